"""The hub's end of one island's connection: what it is, what it is sending, and what is to be sent to it.

The one idea: words go before bytes. What an island must know at once does not wait behind a long transfer, and a
transfer is cut only when there is room for its next piece.
"""

from collections import deque
from collections.abc import Callable, Iterator

from ragtag.outer.protocol import Attach, Beat, Frame, Offer, pack
from ragtag.outer.transfer import Incoming

_MOST_STREAMS = 64


class Session:
    """One connection.

    Args:
        caller: address and port, for messages.
        wake: told that there is something to send.
    """

    def __init__(self, caller: str, wake: Callable[[], None] = lambda: None) -> None:
        self.caller = caller
        self.attach: Attach | None = None
        """What it has said it is; None: nothing yet."""
        self.offer: Offer | None = None
        """What it is sending."""
        self.beat = Beat(step=0)
        self.heard_s = 0.0
        self.closing = ""
        """Why it is to be closed once everything was sent; empty: it is not."""
        self._wake = wake
        self._frames: deque[bytes] = deque()
        self._streams: deque[Iterator[bytes]] = deque()

    @property
    def island(self) -> str:
        """Its name; empty: not known yet."""
        return "" if self.attach is None else self.attach.island

    def say(self, frame: Frame) -> None:
        """Queue a frame."""
        self._frames.append(pack(frame))
        self._wake()

    def stream(self, messages: Iterator[bytes]) -> bool:
        """Queue a transfer; False: too many are already."""
        if len(self._streams) >= _MOST_STREAMS:
            return False
        self._streams.append(messages)
        self._wake()
        return True

    def close(self, reason: str) -> None:
        """Close once everything said was sent."""
        self.closing = self.closing or reason
        self._streams.clear()
        self._wake()

    def next_message(self) -> bytes | None:
        """What to send now; None: nothing."""
        if self._frames:
            return self._frames.popleft()
        while self._streams:
            message = next(self._streams[0], None)
            if message is not None:
                return message
            self._streams.popleft()
        return None


class Arriving:
    """Transfers that are not complete, by island and key; they outlive a connection."""

    def __init__(self) -> None:
        self._by_island: dict[str, dict[str, Incoming]] = {}

    def offered(self, island: str, offer: Offer) -> Incoming:
        """What has come of it so far; one with another key takes the place of an older one of the same thing."""
        own = self._by_island.setdefault(island, {})
        known = own.get(offer.key)
        if known is not None and (known.num_bytes, known.expected) == (offer.num_bytes, offer.digest):
            return known
        own.clear()  # one at a time: whoever offers anew has given the older one up
        own[offer.key] = Incoming(offer.key, offer.num_bytes, offer.digest)
        return own[offer.key]

    def under_way(self, island: str, key: str) -> Incoming | None:
        """The transfer, if it has been offered."""
        return self._by_island.get(island, {}).get(key)

    def done(self, island: str, key: str) -> None:
        """It is complete, or worthless."""
        self._by_island.get(island, {}).pop(key, None)

    def left(self, island: str) -> None:
        """The island is not coming back soon."""
        self._by_island.pop(island, None)
