"""Makes a transport's messages arrive as late as a link between two hosts would deliver them.

The one idea: the sender hands a message to the real transport at the moment when its last byte would have arrived:
after its turn on the link (messages queue behind one another), its bytes / bandwidth, and the latency. The receiver
needs to know nothing. Each direction of a link is its own.
"""

import threading
import time
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Any, Protocol

from ragtag.core.cluster import Link
from ragtag.emulate.link_queue import LinkQueue


class Pending(Protocol):
    """A posted message, as the transport has it."""

    def wait(self) -> None:
        """Block until it is done."""
        ...


class TransportLike(Protocol):
    """What this module asks of a transport."""

    @property
    def rank(self) -> int:
        """This end's rank."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def send(self, tensor: Any, peer: int, tag: int) -> Pending:
        """Post a send of a torch tensor."""
        ...

    def receive(self, tensor: Any, peer: int, tag: int) -> Pending:
        """Post a receive."""
        ...

    def close(self) -> None:
        """End at once."""
        ...


class _Delayed:
    """A message that is still on the link, then whatever the real transport says about it."""

    def __init__(self, send: Callable[[], Pending]) -> None:
        self._send = send
        self._posted = threading.Event()
        self._pending: Pending | None = None
        self._error: BaseException | None = None

    def post(self) -> None:
        try:
            self._pending = self._send()
        except BaseException as error:
            self._error = error
        self._posted.set()

    def wait(self) -> None:
        self._posted.wait()  # bounded: its due time comes, or `close`
        if self._error is not None:
            raise self._error
        assert self._pending is not None
        self._pending.wait()


class LimitedTransport:
    """A transport whose messages to some peers take their time.

    Args:
        inner: sends and receives for real; its errors come through unchanged.
        queues: for each peer behind a limited link, that link's queue in this direction.
        clock: wall clock in seconds; the same one for all users of a queue.
    """

    def __init__(
        self, inner: TransportLike, queues: Mapping[int, LinkQueue], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner = inner
        self._queues = dict(queues)
        self._clock = clock
        self._wake = threading.Condition()
        self._due: list[tuple[float, int, _Delayed]] = []
        self._count = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def rank(self) -> int:
        """This end's rank."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._inner.world_size

    def send(self, tensor: Any, peer: int, tag: int) -> Pending:
        """Post a send; the message leaves when the link would have delivered it."""
        queue = self._queues.get(peer)
        if queue is None:
            return self._inner.send(tensor, peer, tag)
        delayed = _Delayed(lambda: self._inner.send(tensor, peer, tag))
        with self._wake:
            if self._closed:
                delayed.post()
                return delayed
            due_s = queue.reserve(self._clock(), tensor.numel() * tensor.element_size())
            self._count += 1
            heappush(self._due, (due_s, self._count, delayed))
            if self._thread is None:
                self._thread = threading.Thread(target=self._deliver, name="ragtag-emulated-link", daemon=True)
                self._thread.start()
            self._wake.notify()
        return delayed

    def receive(self, tensor: Any, peer: int, tag: int) -> Pending:
        """Post a receive."""
        return self._inner.receive(tensor, peer, tag)

    def close(self) -> None:
        """End at once: what is still on a link fails as the closed transport fails it."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._inner.close()
        with self._wake:
            waiting, self._due = self._due, []
        for _, _, delayed in waiting:
            delayed.post()
        if self._thread is not None:
            self._thread.join(1.0)

    def _deliver(self) -> None:
        while True:
            with self._wake:
                if self._closed:
                    return
                wait_s = self._due[0][0] - self._clock() if self._due else None
                if wait_s is None or wait_s > 0:
                    self._wake.wait(wait_s)
                    continue
                delayed = heappop(self._due)[2]
            delayed.post()


def queues_to_peers(
    hosts: tuple[str, ...],
    rank: int,
    link_between: Callable[[str, str], Link | None],
    queue: Callable[[Link, str], Any],
) -> dict[int, LinkQueue]:
    """Return the queue towards every peer of `rank` that is behind a limited link; peers on one host share one.

    Args:
        hosts: by rank.
        rank: this end's.
        link_between: the link between two hosts, or None.
        queue: makes the queue of a link towards a host.
    """
    own = hosts[rank]
    links = {host: link_between(own, host) for host in hosts if host != own}
    queues = {host: queue(link, host) for host, link in links.items() if link is not None}
    return {peer: queues[host] for peer, host in enumerate(hosts) if host in queues}
