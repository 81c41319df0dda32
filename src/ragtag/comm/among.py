"""Some of the ranks of a transport, as a transport of their own: for sums over those who hold the same stage."""

from collections.abc import Sequence

import torch

from ragtag.comm.transport import Pending, Transport


class AmongTransport:
    """The ranks `members` of `inner`, numbered from 0 in their order.

    Args:
        members: among them this end's own rank.
    """

    def __init__(self, inner: Transport, members: Sequence[int]) -> None:
        self._inner, self._members = inner, tuple(members)
        self._rank = self._members.index(inner.rank)

    @property
    def rank(self) -> int:
        """This end's place among the members."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self._members)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a send."""
        return self._inner.send(tensor, self._members[peer], tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a receive."""
        return self._inner.receive(tensor, self._members[peer], tag)

    def close(self) -> None:
        """Leave the inner transport alone: it is others' too."""
