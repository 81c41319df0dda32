"""A block of the model: its flats, and this rank's slices of the sums of its gradients."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ragtag.runtime.zero.flats import Flat


class SummedFlat:
    """A flat of trained parameters, and this rank's slice of the sum of their gradients over ranks and rounds."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        half = flat.dtype in (torch.float16, torch.bfloat16)
        self._dtype = torch.float32 if half else flat.dtype
        self.sum: torch.Tensor | None = None
        self._now = object()
        """Changes with each sum: what comes late, of one that was given up, is not added to another."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each rank's slice."""
        return self.flat.sizes

    def begin(self) -> None:
        """Forget the sum."""
        self.sum = None
        self._now = object()
        for piece in self.flat.pieces:
            piece.parameter.grad = None

    @torch.no_grad()
    def gradient(self) -> torch.Tensor:
        """Return this round's gradients end to end, which parameters no longer hold; 0 where there is none."""
        content = torch.zeros(self.flat.numel, dtype=self._dtype, device=self.flat.full.device)
        for member in self.flat.members:
            if member.parameter.grad is not None:
                content[member.start : member.stop].copy_(member.parameter.grad.reshape(-1))
                member.parameter.grad = None
        return content

    def adding(self, content: torch.Tensor) -> Callable[[], None]:
        """Return what adds this rank's slice of the reduced `content`."""

        begun = self._now

        @torch.no_grad()
        def add() -> None:
            if begun is not self._now:
                return
            own = content[self.flat.start : self.flat.stop]
            if self.sum is None:
                self.sum = own.clone()
            else:
                self.sum.add_(own)

        return add

    @torch.no_grad()
    def install(self, factor: float, bits: int) -> None:
        """Give each piece of a parameter whose bit is set `factor` x the sum as its gradient; None to the others."""
        if self.sum is not None:
            self.sum.mul_(factor)
        for piece in self.flat.pieces:
            if self.sum is None or not bits >> piece.member.number & 1:
                piece.parameter.grad = None
                continue
            offset = piece.member.start + piece.first - self.flat.start
            own = self.sum[offset : offset + piece.last - piece.first]
            piece.parameter.grad = own.to(piece.parameter.dtype)


def norm_of(summed: Iterable[SummedFlat]) -> torch.Tensor:
    """Return the 2-norm of what this rank has of sums, a scalar on the device (fp64 where it has that)."""
    norms = [torch.linalg.vector_norm(each.sum) for each in summed if each.sum is not None and each.sum.numel()]
    if not norms:
        return torch.zeros(())
    wide = torch.float32 if norms[0].device.type == "mps" else torch.float64
    return torch.linalg.vector_norm(torch.stack([norm.to(wide) for norm in norms]))


class Block:
    """What is gathered, and whose gradients are reduced, at a time.

    Args:
        name: of the module.
        module: whose forward uses it; None: the root, which belongs to no single one.
        flats: its parameters.
    """

    def __init__(self, name: str, module: torch.nn.Module | None, flats: Sequence[Flat]) -> None:
        self.name, self.module, self.flats = name, module, list(flats)
        self.summed = [SummedFlat(flat) for flat in flats if flat.trained]
        self.trained = {member.number: member.parameter for flat in flats if flat.trained for member in flat.members}

    @property
    def is_present(self) -> bool:
        """Whether all its parameters have memory."""
        return all(flat.is_present or not flat.numel for flat in self.flats)

    def release(self) -> None:
        """Give up all but this rank's slices."""
        for flat in self.flats:
            flat.release()

    def begin_sums(self) -> None:
        """Forget the sums."""
        for summed in self.summed:
            summed.begin()

    def outgoing(self) -> Iterator[tuple[SummedFlat, Callable[[torch.Tensor], Callable[[], None]]]]:
        """Give each flat whose gradients are to be reduced, and what makes of its reduced content a sum."""
        for summed in self.summed:
            yield summed, summed.adding
