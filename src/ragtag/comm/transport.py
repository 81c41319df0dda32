"""Point-to-point transports: what a ring or a vote needs from a network, and a fake for threads of one process.

The one idea is MPI's: a send and a receive are posted without blocking, match in the order in which they were posted
per (source, destination, tag), and only `Pending.wait()` blocks, for a bounded time.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Protocol

import torch

TAG_LIMIT = 2**31
"""Tags are integers in [0, TAG_LIMIT): gloo takes a signed 32-bit tag and refuses negative ones."""


class TransportError(Exception):
    """A message could not be sent or received. Private to `comm`: the group turns it into a `PeerError`.

    `peer` is the other rank (None: no particular one), `timed_out` whether it was silent rather than gone, `unreached`
    a rank that could not be connected with (None: that is not what happened).
    """

    def __init__(
        self, message: str, *, peer: int | None, timed_out: bool = False, unreached: int | None = None
    ) -> None:
        super().__init__(message)
        self.peer = peer
        self.unreached = unreached
        self.timed_out = timed_out


class Pending(Protocol):
    """A posted send or receive. Keep it until `wait()` returned: dropping it may drop the message."""

    def wait(self) -> None:
        """Block until the tensor may be reused (send) or read (receive); bounded.

        Raises:
            TransportError: the peer is gone, silent for longer than the transport's timeout, or this end was closed.
        """
        ...


class Transport(Protocol):
    """Posts messages between `world_size` ranks.

    Messages of equal (source, destination, tag) match in posting order on both ends; messages of different tags
    may be posted in any order. Both ends must agree on dtype and number of elements. After a TransportError the
    transport is only good for `close()`.
    """

    @property
    def rank(self) -> int:
        """This end's rank."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a send. A contiguous `tensor` is not copied: leave it alone until `wait()` returned."""
        ...

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a receive into `tensor`, which may be read after `wait()`."""
        ...

    def close(self) -> None:
        """End at once: every wait on this end and every peer's wait on this rank raises TransportError."""
        ...


class _LocalPending:
    def __init__(self, tensor: torch.Tensor, peer: int, doing: str, timeout_s: float) -> None:
        self.tensor = tensor
        self.error: TransportError | None = None
        self._peer = peer
        self._doing = doing
        self._timeout_s = timeout_s
        self._done = threading.Event()

    def finish(self, error: TransportError | None = None) -> None:
        if not self._done.is_set():
            self.error = error
            self._done.set()

    def wait(self) -> None:
        if not self._done.wait(self._timeout_s):
            message = f"{self._doing}: silent for {self._timeout_s:g} s"
            raise TransportError(message, peer=self._peer, timed_out=True)
        if self.error is not None:
            raise self.error


class _Exchange:
    """Posted and not yet matched messages of all ranks, by (source, destination, tag)."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sends: dict[tuple[int, int, int], deque[_LocalPending]] = defaultdict(deque)
        self.receives: dict[tuple[int, int, int], deque[_LocalPending]] = defaultdict(deque)
        self.held: set[tuple[int, int, int]] = set()
        self.closed: set[int] = set()

    def match(self, key: tuple[int, int, int]) -> None:
        sends, receives = self.sends[key], self.receives[key]
        while sends and receives and key not in self.held:
            send, receive = sends.popleft(), receives.popleft()
            assert send.tensor.dtype == receive.tensor.dtype, f"dtypes differ on {key}"
            assert send.tensor.numel() == receive.tensor.numel(), f"sizes differ on {key}"
            receive.tensor.copy_(send.tensor.reshape(receive.tensor.shape))
            send.finish()
            receive.finish()


class LocalTransport:
    """The fake: ranks are threads of one process, faults are scripted by (peer, tag).

    Like gloo it copies nothing when a send is posted: the receiver gets what the tensor holds when both ends have
    posted, so a sender that overwrites its buffer too early is caught here as well.
    """

    def __init__(self, exchange: _Exchange, rank: int, world_size: int, timeout_s: float) -> None:
        self._exchange = exchange
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._faults: set[tuple[int, int]] = set()

    @staticmethod
    def mesh(world_size: int, timeout_s: float = 10.0) -> list["LocalTransport"]:
        """Return the connected ends of ranks 0 .. world_size - 1; a wait lasts at most `timeout_s` seconds."""
        exchange = _Exchange()
        return [LocalTransport(exchange, rank, world_size, timeout_s) for rank in range(world_size)]

    @property
    def rank(self) -> int:
        """This end's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a send."""
        return self._post(self._exchange.sends, (self._rank, peer, tag), tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a receive."""
        return self._post(self._exchange.receives, (peer, self._rank, tag), tensor, peer, tag)

    def fail(self, peer: int, tag: int) -> None:
        """Script a fault: from now on messages of this end to or from `peer` with `tag` raise in `wait()`."""
        self._faults.add((peer, tag))

    def hold(self, peer: int, tag: int) -> Callable[[], None]:
        """Script a delay: messages to `peer` with `tag` are under way until the returned function is called."""
        key = (self._rank, peer, tag)
        with self._exchange.lock:
            self._exchange.held.add(key)

        def release() -> None:
            with self._exchange.lock:
                self._exchange.held.discard(key)
                self._exchange.match(key)

        return release

    def close(self) -> None:
        """End at once, as a killed process would: waits on both sides raise."""
        exchange = self._exchange
        with exchange.lock:
            exchange.closed.add(self._rank)
            for posted in (exchange.sends, exchange.receives):
                for (source, destination, _), queue in posted.items():
                    if self._rank in (source, destination):
                        for pending in queue:
                            pending.finish(_closed(self._rank, source, destination))
                        queue.clear()

    def _post(
        self,
        posted: dict[tuple[int, int, int], deque[_LocalPending]],
        key: tuple[int, int, int],
        tensor: torch.Tensor,
        peer: int,
        tag: int,
    ) -> Pending:
        assert 0 <= tag < TAG_LIMIT, f"tag {tag} is not a 31-bit number"
        assert 0 <= peer < self._world_size, f"no rank {peer} among {self._world_size}"
        assert peer != self._rank, "a rank does not send to itself"
        doing = f"rank {self._rank} waiting for rank {peer} (tag {tag})"
        pending = _LocalPending(tensor, peer, doing, self._timeout_s)
        with self._exchange.lock:
            gone = self._exchange.closed & {peer, self._rank}
            if gone:
                pending.finish(_closed(min(gone), self._rank, peer))
            elif (peer, tag) in self._faults:
                pending.finish(TransportError(f"{doing}: scripted fault", peer=peer))
            else:
                posted[key].append(pending)
                self._exchange.match(key)
        return pending


def _closed(rank: int, one: int, other: int) -> TransportError:
    peer = other if one == rank else one
    return TransportError(f"rank {rank} closed its connection with rank {peer}", peer=rank)
