"""A rank's own gradient sum, and its way into buckets that the ring adds up over all ranks.

The one idea: a bucket is a *copy* of the own sum, launched in one fixed order on every rank as soon as the last
backward has produced everything in it. The own sum stays untouched until the step is applied, so a reduction can
always be done again.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time, thread_time

import torch

from ragtag.comm.group import Group, Work
from ragtag.comm.ring import Wire
from ragtag.core.errors import ModelError
from ragtag.runtime.device import HostMirror
from ragtag.runtime.ring_cost import RingCost

NamedParameters = Sequence[tuple[str, torch.nn.Parameter]]


@dataclass(frozen=True, eq=False)
class Slot:
    """Where one parameter lies in its bucket."""

    index: int
    parameter: torch.nn.Parameter
    view: torch.Tensor


class Bucket:
    """A flat fp32 (fp64 for fp64 parameters) tensor that travels in one piece, and views of it shaped like
    parameters."""

    def __init__(self, members: list[tuple[int, torch.nn.Parameter]], dtype: torch.dtype, *, travels: bool) -> None:
        device = members[0][1].device
        self.flat = torch.zeros(sum(p.numel() for _, p in members), dtype=dtype, device=device)
        self.mirror = HostMirror(self.flat, travels=travels)
        self.slots: list[Slot] = []
        offset = 0
        for index, parameter in members:
            view = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            self.slots.append(Slot(index, parameter, view))
            offset += parameter.numel()
        self.waiting = 0
        self.work: Work | None = None


class GradientSums:
    """Own sums of one step, bucketed and reduced; `install` writes the result to `parameter.grad`.

    Args:
        parameters: (name, parameter) of everything the optimizer trains, in the same order on every rank.
        group: where buckets are reduced.
        bucket_bytes: size at which a bucket is closed.
        wire: "fp32" or "bf16" on the wire.
        overlap: launch buckets from inside the last backward.
        chunk_weights: relative size of what each rank owns in the ring, asked at every launch; None: equal.

    Between steps it leaves gradients alone: a script may run backwards of its own there.
    """

    def __init__(
        self,
        parameters: NamedParameters,
        group: Group,
        *,
        bucket_bytes: int,
        wire: Wire = "fp32",
        overlap: bool = True,
        chunk_weights: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self._group = group
        self._chunk_weights = chunk_weights or (lambda: (1,) * group.world_size)
        self.ring_cost = RingCost()
        self._wire: Wire | None = None if wire == "fp32" else wire
        self._overlap = overlap
        self.names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._bucket_bytes = bucket_bytes
        self._wide = [_needs_fp32_sum(parameter) for parameter in self._parameters]
        self._own: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._make_buckets()
        # How often each parameter's gradient arrives in one backward, learned from the first one. Re-entrant
        # checkpointing makes a shared parameter arrive more than once; one that never arrives must not hold its
        # bucket back.
        self._expected: list[int] | None = None
        self._arrived = [0] * len(self._parameters)
        self._summing = False
        self._launching = False
        self._next = 0
        self.launched_too_early = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda p, index=index: self._on_gradient(index, p))
            for index, parameter in enumerate(self._parameters)
        ]

    @property
    def fingerprint(self) -> str:
        """A hash of what is summed: names, shapes and types of the parameters, in their order."""
        parts = [(name, tuple(p.shape), str(p.dtype)) for name, p in zip(self.names, self._parameters)]
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _make_buckets(self) -> None:
        travels = (self._group.elastic or self._group.world_size > 1) and self._group.device_sum is None
        self.buckets = _make_buckets(self._parameters, self._bucket_bytes, travels=travels)
        self._bucket_of = {slot.index: bucket for bucket in self.buckets for slot in bucket.slots}

    def renew(self) -> None:
        """Put new buckets in the place of the old ones, and keep the own sum: a generation that was left may still
        write into what it was given."""
        self._make_buckets()
        self.ring_cost = RingCost()
        self._reset_launch()

    def begin(self) -> None:
        """Forget the last step's gradients and start a new own sum."""
        self._forget()
        self._reset_launch()

    def drop(self) -> bool:
        """Throw the own sums away, of which a backward that failed has spoilt some; return whether any was launched.

        What was launched stays under way. The rest waits for `launch_rest`, after which all must be launched again.
        """
        self._forget()
        self._summing = self._launching = False
        if self._expected is None:
            self._arrived = [0] * len(self._parameters)  # what came of half a backward teaches nothing
        return self._next > 0

    def _forget(self) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.grad = None
            self._own[index] = None

    def _reset_launch(self) -> None:
        self._summing = self._launching = False
        self._next = 0
        self.launched_too_early = False
        for bucket in self.buckets:
            bucket.work = None

    def begin_forward(self) -> None:
        """Nothing: parameters are whole."""

    def end_backward(self) -> None:
        """Nothing: the last one has launched what it could."""

    def idle_until(self, num_rounds: int) -> None:
        """Nothing: no other rank waits for this one before the step's end."""

    def begin_backward(self, *, last: bool) -> None:
        """Announce the next backward; during the last one of a step, complete buckets are launched as they fill."""
        if self._expected is None and any(self._arrived):
            self._expected = list(self._arrived)
        self._arrived = [0] * len(self._parameters)
        self._summing = True
        self._launching = last and self._overlap and self._expected is not None and self._next == 0
        if self._launching:
            expected = self._expected
            assert expected is not None
            for bucket in self.buckets:
                bucket.waiting = sum(1 for slot in bucket.slots if expected[slot.index] > 0)

    def _on_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None or not self._summing:
            return
        if grad.is_sparse:
            raise ModelError(
                f"parameter '{self.names[index]}' has a sparse gradient; ragtag reduces dense ones. "
                f"Use nn.Embedding(..., sparse=False)."
            )
        if self._wide[index]:
            own = self._own[index]
            if own is None:
                self._own[index] = grad.float()
            else:
                own.add_(grad)
            parameter.grad = None
        self._arrived[index] += 1
        if self._launching:
            self._count_down(index)

    def _count_down(self, index: int) -> None:
        assert self._expected is not None
        bucket = self._bucket_of[index]
        if bucket.work is not None:
            # It arrived after its bucket had left: every rank will reduce again, from own sums that are still whole.
            self.launched_too_early = True
        expected = self._expected[index]
        if self._arrived[index] == expected:
            bucket.waiting -= 1
            while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
                self._launch_next()
        elif self._arrived[index] > expected:
            self._expected[index] = self._arrived[index]

    def _launch_next(self) -> None:
        bucket = self.buckets[self._next]
        sources, targets = [], []
        for slot in bucket.slots:
            own = self.own_sum(slot.index)
            if own is None:
                slot.view.zero_()
            else:
                sources.append(own)
                targets.append(slot.view)
        with torch.no_grad():
            if sources:
                torch._foreach_copy_(targets, sources)
        bucket.mirror.send()
        bucket.work = self._start(bucket, bucket.mirror.host, bucket.mirror.ready)
        self._next += 1  # not before: whatever failed until here has launched nothing

    def _start(self, bucket: Bucket, flat: torch.Tensor, ready: Callable[[], None] | None) -> Work:
        """Start summing `flat`, in place of the bucket's own content, over ranks."""
        return self._group.all_reduce(flat, weights=self._chunk_weights(), wire=self._wire_of(bucket), ready=ready)

    def _wire_of(self, bucket: Bucket) -> Wire | None:
        return self._wire if bucket.flat.dtype == torch.float32 else None  # fp64 is not asked for to be rounded

    def launch_rest(self) -> None:
        """Launch every bucket that the hooks have not launched: unused parameters, ranks without samples."""
        self._summing = self._launching = False
        while self._next < len(self.buckets):
            self._launch_next()

    def launch_again(self, *, overlap: bool) -> None:
        """Reduce once more from the own sums; without `overlap`, from now on only after backward."""
        self._overlap = self._overlap and overlap
        self._reset_launch()
        self.launch_rest()

    def wait(self) -> None:
        """Wait until every bucket holds the sum over ranks (bounded by the group)."""
        began_s, others_began_s = perf_counter(), process_time() - thread_time()
        times = []
        for bucket in self.buckets:
            assert bucket.work is not None
            self._group.wait(bucket.work, "reducing gradients")
            times.append(bucket.work.result)
            bucket.mirror.receive()
        if self._group.world_size > 1:
            self.ring_cost.observe(
                times,
                self._chunk_weights(),
                self._group.rank,
                waited_s=perf_counter() - began_s,
                cpu_s=process_time() - thread_time() - others_began_s,
            )

    def zeros(self) -> list[torch.Tensor]:
        """Host tensors of zeros like the buckets: what a rank adds that has computed nothing."""
        return [torch.zeros_like(bucket.mirror.host) for bucket in self.buckets]

    def launch_flats(self, flats: Sequence[torch.Tensor]) -> list[Work]:
        """Start reducing `flats` in place of the buckets, in their order."""
        return [self._start(bucket, flat, None) for flat, bucket in zip(flats, self.buckets)]

    def accept(self, flats: Sequence[torch.Tensor]) -> None:
        """Take the reduced `flats` for the buckets' sums."""
        for flat, bucket in zip(flats, self.buckets):
            bucket.flat.copy_(flat)

    def own_sum(self, index: int) -> torch.Tensor | None:
        """This rank's own gradient sum of one parameter, or None if it had none."""
        return self._own[index] if self._wide[index] else self._parameters[index].grad

    def non_finite(self) -> list[str]:
        """Names of parameters whose own sum is not finite (slow path, reads the device)."""
        sums = ((name, self.own_sum(index)) for index, name in enumerate(self.names))
        return [name for name, own in sums if own is not None and not bool(torch.isfinite(own).all())]

    def has_gradient(self) -> bytes:
        """One bit per parameter, least significant first: did this rank see a gradient for it."""
        bits = 0
        for index in range(len(self._parameters)):
            if self.own_sum(index) is not None:
                bits |= 1 << index
        return bits.to_bytes((len(self._parameters) + 7) // 8, "little")

    def norm(self) -> torch.Tensor:
        """2-norm of the reduced sum over all buckets, a scalar on the device (fp64 where it has that)."""
        parts = [self._held(bucket) for bucket in self.buckets]
        norms = [torch.linalg.vector_norm(part) for part in parts if part.numel()]
        if not norms:
            return torch.zeros(())
        if len(norms) == 1:
            return norms[0]
        wide = torch.float32 if norms[0].device.type == "mps" else torch.float64
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, wide) for norm in norms]))

    def _held(self, bucket: Bucket) -> torch.Tensor:
        """What this rank has of a bucket's reduced sum."""
        return bucket.flat

    def install(self, factor: float, has_gradient: bytes) -> None:
        """Give every parameter used anywhere `factor` x the reduced sum as its `grad`; None to the others."""
        bits = int.from_bytes(has_gradient, "little")
        for bucket in self.buckets:
            bucket.flat.mul_(factor)
            for slot in bucket.slots:
                index, parameter, view = slot.index, slot.parameter, slot.view
                self._own[index] = None
                if not bits >> index & 1:
                    parameter.grad = None
                else:
                    parameter.grad = view.to(parameter.dtype)


def _needs_fp32_sum(parameter: torch.nn.Parameter) -> bool:
    return parameter.dtype in (torch.float16, torch.bfloat16)


def _make_buckets(parameters: Iterable[torch.nn.Parameter], bucket_bytes: int, *, travels: bool) -> list[Bucket]:
    """Reverse registration order, since backward reaches the last layers first; one dtype and device a bucket."""
    buckets: list[Bucket] = []
    open_members: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.nn.Parameter]]] = {}
    for index, parameter in reversed(list(enumerate(parameters))):
        dtype = torch.float32 if _needs_fp32_sum(parameter) else parameter.dtype
        members = open_members.setdefault((dtype, parameter.device), [])
        members.append((index, parameter))
        if sum(p.numel() for _, p in members) * dtype.itemsize >= bucket_bytes:
            buckets.append(Bucket(members, dtype, travels=travels))
            del open_members[dtype, parameter.device]
    buckets.extend(Bucket(members, dtype, travels=travels) for (dtype, _), members in open_members.items())
    return buckets
