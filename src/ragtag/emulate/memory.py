"""Gives a device a memory cap: parameters, gradients, optimizer state and saved activations, each storage once.

The one idea: autograd itself says what it keeps (`saved_tensors_hooks`) and for how long, so recomputation and smaller
micro-batches save memory here as they do on a real device. Not counted: what lives only inside one operation, what
recomputation keeps while it recomputes, and buckets that travel.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from ragtag.core.quantities import format_bytes

Passing = Callable[[], Iterable[torch.Tensor]]


class MemoryLimit(Protocol):
    """The seam: what a step's work may keep in memory."""

    def attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        passing: Passing | None = None,
    ) -> None:
        """Count this model's parameters and gradients and this optimizer's state.

        `passing` gives what comes and goes while a micro-batch is computed; gradients are among it.
        """
        ...

    def detach(self) -> None:
        """Leave no hook on the model."""
        ...

    def forward_backward(self) -> AbstractContextManager[None]:
        """One micro-batch.

        Raises:
            torch.OutOfMemoryError: in forward or in backward, from where the device would run out.
        """
        ...

    def came(self) -> None:
        """More is passing than before.

        Raises:
            torch.OutOfMemoryError: the device would have no room for it.
        """
        ...

    def evaluation(self) -> AbstractContextManager[None]:
        """One forward of an evaluation.

        Raises:
            torch.OutOfMemoryError: from where the device would run out.
        """
        ...

    def update(self) -> AbstractContextManager[None]:
        """One `optimizer.step()`.

        Raises:
            torch.OutOfMemoryError: the device would have no room for the optimizer's state.
        """
        ...


class NoMemoryLimit:
    """The machine's own memory."""

    def attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        passing: Passing | None = None,
    ) -> None:
        """Do nothing."""

    def detach(self) -> None:
        """Do nothing."""

    def forward_backward(self) -> AbstractContextManager[None]:
        """Return a region that does nothing."""
        return nullcontext()

    def came(self) -> None:
        """Do nothing."""

    def evaluation(self) -> AbstractContextManager[None]:
        """Return a region that does nothing."""
        return nullcontext()

    def update(self) -> AbstractContextManager[None]:
        """Return a region that does nothing."""
        return nullcontext()


class MemoryCap:
    """At most `cap_bytes` on the device `device`. One thread uses it: the one that calls `backward()`.

    Optimizer state that the first `optimizer.step()` creates is seen at its end. Of a forward that keeps nothing, the
    largest module counts, with what it is given and what it returns.
    """

    def __init__(self, cap_bytes: int, *, device: str) -> None:
        self.cap_bytes = cap_bytes
        self.peak_bytes = 0
        self._device = device
        self._model: torch.nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._passing: Passing | None = None
        self._hooks: list[Any] = []
        self._kept_bytes = 0
        self._kept_storages: set[int] = set()
        self._activations = _Activations()
        self._active = False

    def attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        passing: Passing | None = None,
    ) -> None:
        """Count this model's parameters and gradients and this optimizer's state, and what is `passing`."""
        self.detach()
        self._model, self._optimizer, self._passing = model, optimizer, passing
        for parameter in model.parameters():
            if parameter.requires_grad:
                # A hook that held on to its own parameter would keep both alive.
                self._hooks.append(parameter.register_hook(_gradient_hook(self._on_gradient, parameter)))

    def detach(self) -> None:
        """Leave no hook on the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._model = self._optimizer = self._passing = None

    @property
    def used_bytes(self) -> int:
        """What is counted now: as of the last region's start, and everything that came since."""
        passing = 0 if self._passing is None else self._bytes_of(list(self._passing()))
        return self._kept_bytes + self._activations.num_bytes + passing

    def came(self) -> None:
        """More is passing than before. Raises torch.OutOfMemoryError where the device would have no room for it."""
        if self._active:
            self._require(0, "to gather parameters")

    @contextmanager
    def forward_backward(self) -> Iterator[None]:
        """One micro-batch."""
        self._count_kept()
        self._active = True
        try:
            self._require(0, "at the start of a micro-batch")
            with torch.autograd.graph.saved_tensors_hooks(self._save, _restore):
                yield
        finally:
            self._active = False

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """One forward of an evaluation."""
        self._count_kept()

        def passing(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._require(self._bytes_of((inputs, output)), "to compute a module in forward")

        hook = torch.nn.modules.module.register_module_forward_hook(passing)
        try:
            self._require(0, "at the start of an evaluation's forward")
            yield
        finally:
            hook.remove()

    @contextmanager
    def update(self) -> Iterator[None]:
        """One `optimizer.step()`."""
        self._count_kept()
        before = self._kept_bytes
        yield
        self._count_kept()
        if self._kept_bytes > before:
            self._require(0, "for the optimizer's state")

    def _bytes_of(self, values: Any) -> int:
        """Bytes of the tensors in `values` that are not kept anyway."""
        storages = {}
        for value in pytree.tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                storage = value.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        return sum(size for key, size in storages.items() if key not in self._kept_storages)

    def _is_passing(self, storage: torch.UntypedStorage) -> bool:
        return self._passing is not None and any(
            storage._cdata == each.untyped_storage()._cdata for each in self._passing()
        )

    def _count_kept(self) -> None:
        sizes: dict[int, int] = {}
        for tensor in self._kept_tensors():
            if tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
        self._kept_storages = set(sizes)
        self._kept_bytes = sum(sizes.values())

    def _kept_tensors(self) -> Iterable[torch.Tensor]:
        if self._model is not None:
            for parameter in self._model.parameters():
                yield parameter
                if parameter.grad is not None and self._passing is None:
                    yield parameter.grad
            yield from self._model.buffers()
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _save(self, tensor: torch.Tensor) -> "_Saved | torch.Tensor":
        if tensor.layout != torch.strided:
            return tensor.detach()
        storage = tensor.untyped_storage()
        if storage._cdata in self._kept_storages or self._is_passing(storage):
            return tensor.detach()
        if not self._activations.holds(storage):
            self._require(storage.nbytes(), "to keep an activation in forward")
        saved = _Saved(tensor.detach(), self._activations)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return saved

    def _on_gradient(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        if self._active and parameter.grad is None:
            num_bytes = grad.numel() * grad.element_size()
            self._require(num_bytes, "for a gradient in backward")
            if self._passing is None:
                self._kept_bytes += num_bytes

    def _require(self, num_bytes: int, purpose: str) -> None:
        wanted = self.used_bytes + num_bytes
        self.peak_bytes = max(self.peak_bytes, min(wanted, self.cap_bytes))
        if wanted > self.cap_bytes:
            raise torch.OutOfMemoryError(
                f"Emulated device '{self._device}' is out of memory: {format_bytes(num_bytes)} wanted {purpose}, with "
                f"{format_bytes(self.used_bytes)} in use of {format_bytes(self.cap_bytes)}. Smaller micro-batches need "
                f"less: Config(micro_batch=...); or give the device more in the cluster file: memory = ..."
            )


@contextmanager
def counting(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[MemoryCap]:
    """Give a cap that nothing reaches: it only counts."""
    counter = MemoryCap(1 << 62, device="this device")
    counter.attach(model, optimizer)
    try:
        yield counter
    finally:
        counter.detach()


class _Activations:
    """Storages that graphs hold on to, and how many times each."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._holders: dict[int, int] = {}

    def holds(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._holders

    def add(self, key: int, num_bytes: int) -> None:
        holders = self._holders.get(key, 0)
        self._holders[key] = holders + 1
        if holders == 0:
            self.num_bytes += num_bytes

    def remove(self, key: int, num_bytes: int) -> None:
        holders = self._holders.pop(key) - 1
        if holders:
            self._holders[key] = holders
        else:
            self.num_bytes -= num_bytes


class _Saved:
    """A tensor that a graph keeps; counted from construction until the graph lets go of it."""

    __slots__ = ("_activations", "_key", "_num_bytes", "tensor")

    def __init__(self, tensor: torch.Tensor, activations: _Activations) -> None:
        storage = tensor.untyped_storage()
        self.tensor = tensor
        self._activations = activations
        # The address stays this storage's own for as long as `tensor` keeps it alive.
        self._key = storage._cdata
        self._num_bytes = storage.nbytes()
        activations.add(self._key, self._num_bytes)

    def __del__(self) -> None:
        self._activations.remove(self._key, self._num_bytes)


def _restore(saved: "_Saved | torch.Tensor") -> torch.Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved


def _gradient_hook(
    on_gradient: Callable[[torch.Tensor, torch.Tensor], None], parameter: torch.Tensor
) -> Callable[[torch.Tensor], None]:
    reference = weakref.ref(parameter)

    def hook(grad: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            on_gradient(alive, grad)

    return hook
