"""Parameters end to end in flat tensors, each cut into one slice a rank; this rank's slice as pieces of parameters.

The one idea: a piece is a parameter of its own, a view of this rank's slice, so any elementwise optimizer works on it
and keeps its state for what this rank owns and for nothing else. What no gradient reached stays untouched, parameter by
parameter, as with whole ones.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ragtag.core.chunks import chunk_sizes


class Member(NamedTuple):
    """One parameter and its place in a flat tensor, in elements."""

    number: int
    """Among the model's parameters."""
    name: str
    parameter: torch.nn.Parameter
    start: int
    stop: int


class Piece(NamedTuple):
    """What this rank owns of one parameter."""

    member: Member
    first: int
    """Of the flattened parameter's elements."""
    last: int
    """The one after."""
    parameter: torch.nn.Parameter
    """What the optimizer trains: 1-D, a view of the rank's slice."""


class Flat:
    """Parameters of one dtype, device and block, end to end.

    Args:
        parameters: (index, name, parameter), all of one dtype.
        weights: relative size of each rank's slice.
        rank: this one.
        device: where it lies from now on.
        whole: all of it stays; else only this rank's slice does, until `fill`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[int, str, torch.nn.Parameter]],
        *,
        weights: Sequence[int],
        rank: int,
        device: torch.device,
        whole: bool,
    ) -> None:
        self.members: list[Member] = []
        offset = 0
        for index, name, parameter in parameters:
            self.members.append(Member(index, name, parameter, offset, offset + parameter.numel()))
            offset += parameter.numel()
        self.numel, self.whole, self._rank = offset, whole, rank
        self.dtype = self.members[0].parameter.dtype
        self.trained = self.members[0].parameter.requires_grad
        with torch.no_grad():
            content = torch.cat([member.parameter.detach().reshape(-1) for member in self.members]).to(device)
        self.full = content
        self._absent = [torch.full((), torch.nan, dtype=self.dtype, device=device)] * len(self.members)
        self._cut(weights)
        self._take_own(content)
        self._point(present=True)
        if not whole:
            self.release()

    def _cut(self, weights: Sequence[int]) -> None:
        self.sizes = tuple(chunk_sizes(self.numel, weights))
        self.start = sum(self.sizes[: self._rank])
        self.stop = self.start + self.sizes[self._rank]

    def _take_own(self, content: torch.Tensor) -> None:
        """Make this rank's slice, and pieces of it, from the whole `content`."""
        self.own = self._kept(content[self.start : self.stop])
        self.pieces = []
        for member in self.members:
            low, high = max(self.start, member.start), min(self.stop, member.stop)
            if low < high:
                view = self.own[low - self.start : high - self.start]
                piece = torch.nn.Parameter(view, requires_grad=member.parameter.requires_grad)
                self.pieces.append(Piece(member, low - member.start, high - member.start, piece))

    def _kept(self, own: torch.Tensor) -> torch.Tensor:
        """What stays of the whole content, of which `own` is this rank's slice, when the rest goes."""
        return own if self.whole else own.clone()

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return self.numel * self.dtype.itemsize

    @property
    def is_present(self) -> bool:
        """Whether all of it has memory."""
        return self.full.untyped_storage().nbytes() > 0

    def fill(self) -> None:
        """Give all of it memory, with this rank's slice in its place; the others' are to be gathered."""
        if not self.is_present:
            self.full.untyped_storage().resize_(self.num_bytes)
            with torch.no_grad():
                self.full[self.start : self.stop].copy_(self.own)
            self._point(present=True)

    def release(self) -> None:
        """Give up all but this rank's slice. What reads parameters meanwhile finds not-a-number."""
        if not self.whole and self.is_present:
            self._point(present=False)
            self.full.untyped_storage().resize_(0)

    def renew(self) -> None:
        """Give up all but this rank's slice where somebody may still write into what it was gathered into."""
        if not self.whole:
            self._point(present=False)
            self.full = torch.empty(self.numel, dtype=self.dtype, device=self.full.device)
            self.full.untyped_storage().resize_(0)

    def move_to(self, rank: int, weights: Sequence[int], content: torch.Tensor) -> None:
        """Cut anew, from all of its `content`; this rank is `rank` from now on."""
        self._rank = rank
        self._cut(weights)
        content = content.to(self.full.device)
        if self.whole:  # in other memory: a generation that was left may still write into the old one
            self.full = content
            self._point(present=True)
        self._take_own(content)

    def _point(self, *, present: bool) -> None:
        # Never at memory that was given up: a reader there would end the process. Graphs hold views of the same
        # storage, whose memory comes back in time for backward.
        for member, absent in zip(self.members, self._absent):
            shape = member.parameter.shape
            member.parameter.data = (
                self.full[member.start : member.stop].view(shape) if present else absent.expand(shape)
            )


def flats_of(
    parameters: Sequence[tuple[int, str, torch.nn.Parameter]],
    make: Callable[[Sequence[tuple[int, str, torch.nn.Parameter]]], Flat],
    *,
    limit_bytes: int | None = None,
) -> list[Flat]:
    """Return flats of `parameters` in their order: one for each dtype, trained or frozen; of `limit_bytes` or a little
    more, where that is set."""
    open_lists: dict[tuple[torch.dtype, bool], list[tuple[int, str, torch.nn.Parameter]]] = {}
    flats = []
    for each in parameters:
        parameter = each[2]
        key = parameter.dtype, parameter.requires_grad
        members = open_lists.setdefault(key, [])
        members.append(each)
        if limit_bytes is not None and sum(p.nbytes for _, _, p in members) >= limit_bytes:
            flats.append(make(open_lists.pop(key)))
    flats += [make(members) for members in open_lists.values()]
    return flats
