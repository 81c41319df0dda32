"""Sums of gradients of what this rank's stage holds: what `GradientSums` is to whole replicas.

The one idea: autograd adds a stage's micro-batches up where gradients lie. Only what several ranks hold, because there
are several pipelines or because parameters are tied, is added up over those ranks, all of it in one fixed order.
"""

import hashlib
from collections.abc import Iterator, Sequence

import torch

from ragtag.comm.among import AmongTransport
from ragtag.comm.group import Group, Work
from ragtag.comm.ring import Ring, Wire
from ragtag.comm.transport import Transport
from ragtag.core.chunks import chunk_sizes
from ragtag.core.errors import ModelError
from ragtag.runtime.pipe.stage_flats import StageFlat
from ragtag.runtime.ring_cost import RingCost
from ragtag.runtime.zero.block import SummedFlat, norm_of

_HALF = (torch.float16, torch.bfloat16)


class StageSums:
    """Of one rank.

    Args:
        names: of the model's parameters.
        flats: of all stages, in one order on every rank.
        group: all ranks of the run.
        wire: what travels between those who hold the same.
    """

    def __init__(self, names: Sequence[str], flats: Sequence[StageFlat], group: Group, *, wire: Wire) -> None:
        self.names, self._flats, self._group = list(names), list(flats), group
        self._wire: Wire = wire
        self.ring_cost = RingCost()
        self.launched_too_early = False
        self._own = [(flat, SummedFlat(flat)) for flat in flats if flat.trained and flat.held]
        self._any_shared = any(flat.trained and len(flat.owners) > 1 for flat in flats)
        """By anybody: then every rank has a job in each step, whether or not it holds any of that."""
        self._bits = 0
        self._work: Work | None = None
        self._travelling: list[tuple[SummedFlat, torch.Tensor]] = []
        """What this rank shares, and its sum in host memory."""

    @property
    def fingerprint(self) -> str:
        """A hash of what is summed, in its order."""
        parts = [
            (member.name, tuple(member.parameter.shape), str(flat.dtype), flat.owners)
            for flat in self._flats
            for member in flat.members
        ]
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def begin(self) -> None:
        """Forget the last step's gradients and start new sums."""
        for _, summed in self._own:
            summed.begin()
            for member in summed.flat.members:
                member.parameter.grad = None
        self._bits, self._work, self._travelling = 0, None, []

    def drop(self) -> bool:
        """This rank's backward has failed: what is in the sums is worthless, on all ranks."""
        self.begin()
        return True

    def renew(self) -> None:
        """Begin anew."""
        self.begin()

    def begin_forward(self) -> None:
        """Nothing: parameters are whole."""

    def begin_backward(self, *, last: bool) -> None:
        """Nothing: gradients stay where they are."""

    def end_backward(self) -> None:
        """After a backward: gradients of half precision go into sums of fp32."""
        for flat, summed in self._own:
            if flat.dtype in _HALF:
                self._collect(summed)

    def idle_until(self, num_rounds: int) -> None:
        """Nothing: every rank has its turns."""

    def launch_rest(self) -> None:
        """Start adding up what several ranks hold."""
        for _, summed in self._own:
            self._collect(summed)
        if not self._any_shared:
            return
        jobs: list[tuple[int, tuple[int, ...], torch.Tensor]] = []
        for flat, summed in self._own:
            if len(flat.owners) == 1:
                continue
            if summed.sum is None:
                summed.sum = summed.gradient()
            content = summed.sum.cpu()  # where it travels; what lies on a device comes back in `wait`
            self._travelling.append((summed, content))
            jobs.append((self._flats.index(flat), flat.owners, content))

        def job(transport: Transport) -> None:
            for number, owners, content in jobs:
                among = AmongTransport(transport, sorted(owners))
                wire: Wire | None = self._wire if content.dtype == torch.float32 else None
                ring = Ring(among)
                ring.all_reduce(content, chunk_sizes(content.numel(), (1,) * among.world_size), number, wire)
                self._group.count_sent(ring.sent_bytes)

        self._work = self._group.on_transport(job)

    def launch_again(self, *, overlap: bool) -> None:
        """Begin anew: all ranks do all of the step again."""
        self.begin()

    def wait(self) -> None:
        """Wait until this rank holds the sum of what its stage holds (bounded by the group)."""
        if self._work is None:
            return
        self._group.wait(self._work, "reducing gradients")
        for summed, content in self._travelling:
            if summed.sum is not None and content is not summed.sum:
                summed.sum.copy_(content)
        self._work, self._travelling = None, []

    def norm(self) -> torch.Tensor:
        """2-norm of what this rank speaks for, a scalar on the device."""
        return norm_of(summed for flat, summed in self._own if flat.speaks)

    def has_gradient(self) -> bytes:
        """One bit per parameter, least significant first: did this rank see a gradient for it."""
        return self._bits.to_bytes((len(self.names) + 7) // 8, "little")

    def non_finite(self) -> list[str]:
        """Names of parameters whose sum is not finite (slow path, reads the device)."""
        found = []
        for _, summed in self._own:
            if summed.sum is not None and not bool(torch.isfinite(summed.sum).all()):
                found += [
                    member.name
                    for member in summed.flat.members
                    if not bool(torch.isfinite(summed.sum[member.start : member.stop]).all())
                ]
        return found

    def install(self, factor: float, has_gradient: bytes) -> None:
        """Give every parameter that was used anywhere `factor` x the sum as its `grad`; None to the others."""
        bits = int.from_bytes(has_gradient, "little")
        for _, summed in self._own:
            summed.install(factor, bits)

    def passing(self) -> Iterator[torch.Tensor]:
        """Gradients, and what they are added up in."""
        for _, summed in self._own:
            if summed.sum is not None:
                yield summed.sum
            for member in summed.flat.members:
                if member.parameter.grad is not None:
                    yield member.parameter.grad

    def close(self) -> None:
        """Nothing: there are no hooks."""

    def _collect(self, summed: SummedFlat) -> None:
        """Move gradients from parameters into the sum."""
        came = [member for member in summed.flat.members if member.parameter.grad is not None]
        for member in came:
            if member.parameter.grad is not None and member.parameter.grad.is_sparse:
                raise ModelError(
                    f"parameter '{member.name}' has a sparse gradient; ragtag reduces dense ones. "
                    f"Use nn.Embedding(..., sparse=False)."
                )
            self._bits |= 1 << member.number
        if not came:
            return
        content = summed.gradient()
        if summed.sum is None:
            summed.sum = content
        else:
            summed.sum.add_(content)
