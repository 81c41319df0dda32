"""The real transport: gloo's point-to-point messages over TCP sockets of one interface.

The one idea: a `ProcessGroupGloo` that is registered nowhere and never runs a collective, so that several can live
in one process, each can be thrown away, and every wait ends.

How trouble shows up (torch 2.13; `tests/comm/test_gloo.py` holds each of these):

- *A peer's process dies*: every wait on it raises within milliseconds ("Connection closed by peer", "reset by peer").
  Ranks that wait for somebody else notice nothing.
- *A peer is silent* (stopped, unplugged): the wait raises after `timeout_s`, counted from the call of `wait`. That
  closes all connections of this end: every other wait here and every peer's wait on this rank raises at once.
- *The last reference is dropped*: peers see a closed connection, but only once every unfinished message is gone too,
  because each keeps the connection alive; a thread of this process that waits is not woken. `close()` therefore
  waits 1 ms for a message that never comes, which closes all connections and wakes both sides (gloo's own `abort`
  and `shutdown` do nothing).
- *A receive smaller than what is sent* calls `std::terminate`: the process is gone. Both ends must compute sizes from
  values they have agreed on.
- A send finishes when the receive is posted and the bytes are in the kernel; dropping an unfinished one loses it.
"""

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store

from ragtag.comm.transport import TAG_LIMIT, Pending, TransportError
from ragtag.core.errors import LaunchError

_CLOSING_TAG = TAG_LIMIT - 1
_Gloo: Any = ProcessGroupGloo  # torch's stubs know neither its options nor its messages.


class _GlooPending:
    __slots__ = ("_peer", "_target", "_tensor", "_verb", "_work")

    def __init__(self, work: Any, tensor: torch.Tensor, target: torch.Tensor | None, peer: int, verb: str) -> None:
        self._work = work
        self._tensor = tensor
        self._target = target
        self._peer = peer
        self._verb = verb

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _translated(error, self._verb, self._peer) from None
        if self._target is not None:
            self._target.copy_(self._tensor.view(self._target.shape))


class GlooTransport:
    """A `Transport` over gloo, connected to all peers when the constructor returns.

    Args:
        store: where ranks publish their addresses; give each transport a `PrefixStore` of its own.
        rank: this end's rank.
        world_size: number of ranks.
        timeout_s: bounds the constructor and every wait, in seconds.
        address: local address or host name to listen on; only the interface it belongs to is bound.
        interface: name of the interface to bind ("eth0"), instead of `address`.

    Raises:
        LaunchError: not exactly one of `address` and `interface`, or it is not of this machine.
        TransportError: not all ranks connected within `timeout_s`.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, timeout_s: float, address: str = "", interface: str = ""
    ) -> None:
        if bool(address) == bool(interface):
            raise LaunchError(
                f"Rank {rank}: give the data connections one interface to listen on, by address or by name, "
                f"not address={address!r} and interface={interface!r}."
            )
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        try:
            options._devices = [_Gloo.create_device(hostname=address, interface=interface, lazy_init=False)]
        except RuntimeError as error:
            raise LaunchError(
                f"Rank {rank}: {address or interface!r} is no address or interface of this machine "
                f"({_first_line(error)}). `ip -brief address` lists what there is."
            ) from error
        try:
            self._group: Any = _Gloo(store, rank, world_size, options)
        except RuntimeError as error:
            raise TransportError(
                f"rank {rank}: the {world_size} ranks did not connect within {timeout_s:g} s ({_first_line(error)})",
                peer=None,
                timed_out=True,
            ) from error

    @property
    def rank(self) -> int:
        """This end's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a send of a CPU tensor of any dtype and shape."""
        tensor = tensor.contiguous()
        try:
            return _GlooPending(self._open_group(peer).send([tensor], peer, tag), tensor, None, peer, "sending to")
        except RuntimeError as error:
            raise _translated(error, "sending to", peer) from None

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a receive into a CPU tensor of any dtype and shape."""
        target = None
        if not tensor.is_contiguous():
            target, tensor = tensor, torch.empty(tensor.shape, dtype=tensor.dtype)
        try:
            work = self._open_group(peer).recv([tensor], peer, tag)
        except RuntimeError as error:
            raise _translated(error, "receiving from", peer) from None
        return _GlooPending(work, tensor, target, peer, "receiving from")

    def close(self) -> None:
        """Close every connection: waits on it raise here (in other threads) and at the peers. May be called twice."""
        group, self._group = self._group, None
        if group is None:
            return
        for peer in range(self._world_size):
            if peer != self._rank:
                try:
                    group.recv([torch.empty(1)], peer, _CLOSING_TAG).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    pass  # Raising is how it closes.

    def _open_group(self, peer: int) -> Any:
        if self._group is None:
            raise TransportError(f"rank {self._rank} closed its connection with rank {peer}", peer=self._rank)
        return self._group


def _translated(error: RuntimeError, verb: str, peer: int) -> TransportError:
    # Not "Application timeout caused pair closure": that is another wait of this end, or close().
    timed_out = "Timed out waiting" in str(error)
    return TransportError(f"{verb} rank {peer}: {_first_line(error)}", peer=peer, timed_out=timed_out)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
