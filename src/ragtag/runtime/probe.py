"""One rank's device, model, optimizer and data as the `Probe` that `ragtag.profile` measures.

The one idea: it does what a training step does, with the run's own loader, loss function, buffers, gradient sums, pace
and memory cap, and puts everything back that this changes.
"""

import copy
import gc
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ragtag.core.profile import Block
from ragtag.emulate.memory import MemoryCap, MemoryLimit, NoMemoryLimit, counting
from ragtag.profile.probe import MicroBatch, Update
from ragtag.runtime.batches import to_device
from ragtag.runtime.block_probe import measure_blocks
from ragtag.runtime.blocks import find_blocks, recomputing
from ragtag.runtime.device import copies_asynchronously
from ragtag.runtime.loss import Loss, as_loss
from ragtag.runtime.loss_sums import LossSums
from ragtag.runtime.marks import Arrivals, mark, seconds_from
from ragtag.runtime.precision import autocast
from ragtag.runtime.run import Run

_PART_OF_FREE_MEMORY = 0.8


class RunProbe:
    """Measures with `run`, before its first step.

    Args:
        run: this rank.
        least: smallest micro-batch, in samples.
        ranks_on_host: how many ranks share this host's memory, on a CPU.
        pretended: the device is emulated, and has no limit but the one it is given.
    """

    def __init__(self, run: Run, *, least: int, ranks_on_host: int = 1, pretended: bool = False) -> None:
        self._run = run
        self._least = least
        self._epoch = run.sampler.batch(1).epoch
        self._step = 0
        self._reads = 0
        self._arrivals: Arrivals | None = None
        self._blocks, self.refusal = find_blocks(run.model, run.config.blocks)
        self.capacity_bytes, self._limit = _limits(run, ranks_on_host)
        if pretended and self._limit is not run.memory:
            self.capacity_bytes = None  # the machine's own memory still ends the search

    def micro_batch(self, samples: int, *, recompute: bool) -> MicroBatch:
        """Forward and backward of one micro-batch, as a step does it: read, paced, under the memory cap."""
        run = self._run
        began_s = time.perf_counter()
        data = self._read(samples)
        data_s = time.perf_counter() - began_s
        # Numbers before the first step: drift has not begun and stalls are not due, but luck is drawn anew each time.
        self._step -= 1
        run.pace.step(self._step)
        sums = run.replica_sums()
        sums.begin()
        if self._arrivals is None:
            self._arrivals = Arrivals([[slot.parameter for slot in bucket.slots] for bucket in sums.buckets])
        arrivals = self._arrivals
        with arrivals.watched():
            marks = self._compute(data, samples, recompute, paced=True, memory=run.memory, arrivals=arrivals)
        forward_s, total_s, *ready_s = marks
        ready = tuple(max(0.0, seconds - forward_s) for seconds in ready_s)
        return MicroBatch(data_s=data_s, forward_s=forward_s, total_s=total_s, ready_s=ready)

    def update(self) -> Update:
        """End a step after a small micro-batch; parameters are put back, optimizer state stays until `restored`."""
        run, least = self._run, self._least
        sums, device = run.replica_sums(), run.device
        losses = LossSums(run.nature.metric_names, device)
        sums.begin()
        data = self._read(least)
        self._compute(data, least, False, paced=False, memory=run.memory, losses=losses)
        before = [parameter.detach().clone() for parameter in run.model.parameters()]
        self._step -= 1
        run.pace.step(self._step)
        start = mark(device)
        for bucket in sums.buckets:
            for slot in bucket.slots:
                own = sums.own_sum(slot.index)
                slot.view.zero_() if own is None else slot.view.copy_(own)
        losses.numbers(sums.norm(), run.lr)
        sums.install(1 / (run.loss_factor * least), sums.has_gradient())
        with run.pace.fixed():
            pass
        prepared = mark(device)
        with run.pace.optimizer():
            run.optimizer.step()
        fixed_s, whole_s = seconds_from(start, [prepared, mark(device)])
        with torch.no_grad():
            for parameter, value in zip(run.model.parameters(), before):
                parameter.copy_(value)
        sums.begin()
        return Update(fixed_s=fixed_s, optimizer_s=whole_s - fixed_s)

    def fits(self, samples: int, *, recompute: bool) -> bool:
        """Whether such a micro-batch raises no out-of-memory error, unpaced."""
        try:
            self._attempt(samples, recompute, self._limit)
            return True
        except torch.OutOfMemoryError:
            pass  # Out of the handler first: the traceback holds what is to be freed.
        self._run.abandon_step()
        gc.collect()
        self._empty_cache()
        return False

    def peak_bytes(self, samples: int, *, recompute: bool) -> int:
        """Most memory in use: what the allocator says, on a CPU what is kept for backward."""
        device, module = self._run.device, _allocator(self._run.device)
        self._empty_cache()
        if module is not None:
            module.reset_peak_memory_stats(device)
            self._attempt(samples, recompute, NoMemoryLimit())
            module.synchronize(device)
            return int(module.max_memory_allocated(device))
        with counting(self._run.model, self._run.optimizer) as counter:
            self._attempt(samples, recompute, counter)
        return counter.peak_bytes

    def kept_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        parameters = list(self._run.model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return _num_bytes(parameters) + _num_bytes(trained) + self.optimizer_bytes()

    def optimizer_bytes(self) -> int:
        """The optimizer's state, as it is now."""
        states = self._run.optimizer.state.values()
        return _num_bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))

    def blocks(self, samples: int, sample_s: float) -> tuple[Block, ...]:
        """The blocks' times and bytes; together they take `sample_s` a sample, on an emulated device in its time."""
        if self.refusal:
            return ()
        run = self._run
        data = to_device(self._read(samples), run.device)
        with counting(run.model, run.optimizer) as counter:
            blocks, self.refusal = measure_blocks(
                run.model,
                self._blocks,
                lambda: self._loss(data, samples).total * run.loss_factor,
                samples=samples,
                device=run.device,
                autocast=lambda: autocast(run.device_precision, run.device),
                counter=counter,
                sample_s=sample_s,
            )
        run.abandon_step()
        return blocks

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put parameters, buffers, optimizer state and gradients back at the end as they are now."""
        run = self._run
        with torch.no_grad():
            tensors = [tensor.detach() for _, tensor in run.named_tensors()]
            values = [tensor.to("cpu", copy=True) for tensor in tensors]
        state = copy.deepcopy(run.optimizer.state_dict()) if run.optimizer.state else None
        try:
            yield
        finally:
            run.abandon_step()
            with torch.no_grad():
                for tensor, value in zip(tensors, values):
                    tensor.copy_(value)
            run.optimizer.state.clear()
            if state is not None:
                run.optimizer.load_state_dict(state)
            if self._limit is not run.memory:
                self._limit.detach()
            self._empty_cache()

    def _attempt(self, samples: int, recompute: bool, memory: MemoryLimit) -> None:
        """As in a step of several micro-batches, in which gradients of an earlier one are there already."""
        self._run.replica_sums().begin()
        for size in (self._least, samples):
            self._compute(self._read(size), size, recompute, paced=False, memory=memory)

    def _read(self, samples: int) -> Any:
        run = self._run
        self._reads += 1
        key = (1, -self._reads)
        run.loader.request(key, self._epoch, run.sampler.indices(1, 0, samples))
        return run.loader.take([key])

    def _compute(
        self,
        data: Any,
        samples: int,
        recompute: bool,
        *,
        paced: bool,
        memory: MemoryLimit,
        losses: LossSums | None = None,
        arrivals: Arrivals | None = None,
    ) -> list[float]:
        """Return the seconds from the start to the end of forward, of backward, and until each bucket is complete."""
        run = self._run
        run.buffers.begin()
        start, marks = mark(run.device), []
        region = run.pace.forward_backward(samples) if paced else nullcontext()
        with recomputing(self._blocks, active=recompute), region, memory.forward_backward():
            batch = to_device(data, run.device, non_blocking=copies_asynchronously(run.device))
            loss = self._loss(batch, samples)
            marks.append(mark(run.device))
            run.buffers.end_forward(samples)
            if losses is not None:
                losses.add(loss, (0,))
            run.replica_sums().begin_backward(last=False)
            if loss.total.requires_grad:
                (loss.total * run.loss_factor).backward()
            del loss
        marks.append(mark(run.device))
        run.buffers.roll_back()
        return seconds_from(start, [*marks, *(arrivals.marks() if arrivals is not None else ())])

    def _loss(self, batch: Any, samples: int) -> Loss:
        run = self._run
        with autocast(run.device_precision, run.device):
            return as_loss(run.loss_fn(run.model, batch), num_samples=samples)

    def _empty_cache(self) -> None:
        module = _allocator(self._run.device)
        if module is not None:
            module.empty_cache()


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _allocator(device: torch.device) -> Any | None:
    """The module that knows an accelerator's memory; None where there is no such thing."""
    if device.type in ("cpu", "mps"):
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def _limits(run: Run, ranks_on_host: int) -> tuple[int | None, MemoryLimit]:
    """What the device has, and what raises when a micro-batch needs more."""
    if isinstance(run.memory, MemoryCap):
        return run.memory.cap_bytes, run.memory
    if run.device.type != "cpu":
        module = _allocator(run.device)
        if module is None or not hasattr(module, "mem_get_info"):
            return None, NoMemoryLimit()
        free_bytes = module.mem_get_info(run.device)[0]
        return int(free_bytes + module.memory_reserved(run.device)), NoMemoryLimit()
    free_bytes = _free_host_bytes()
    if free_bytes is None:
        return None, NoMemoryLimit()
    capacity_bytes = int(_PART_OF_FREE_MEMORY * free_bytes / ranks_on_host)
    cap = MemoryCap(capacity_bytes, device="cpu")
    cap.attach(run.model, run.optimizer)
    return capacity_bytes, cap


def _free_host_bytes(file: Path = Path("/proc/meminfo")) -> int | None:
    try:
        for line in file.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (OSError, ValueError):
        return None
