"""Bytes that go over a link which may break at any moment: sent in pieces, gone on with where they stopped.

The one idea: whoever receives says how much it has; a piece that does not begin exactly there, or whose checksum is
wrong, changes nothing. What is complete is compared with the digest of the whole before anybody looks into it.
"""

from collections.abc import Iterator
from hashlib import blake2b
from zlib import crc32

from ragtag.core.errors import RagtagError
from ragtag.outer.protocol import PIECE_BYTES, Piece


class TransferError(RagtagError, ValueError):
    """What came is not what was offered."""


def digest(data: bytes | bytearray | memoryview) -> str:
    """Of all bytes of a transfer."""
    return blake2b(data, digest_size=16).hexdigest()


def pieces(key: str, data: bytes | memoryview, offset: int) -> Iterator[tuple[Piece, memoryview]]:
    """Cut `data`, from `offset` on, into what is sent."""
    view = memoryview(data)
    for start in range(offset, len(view), PIECE_BYTES):
        payload = view[start : start + PIECE_BYTES]
        yield Piece(key=key, offset=start, crc32=crc32(payload)), payload


class Incoming:
    """One transfer on its way in.

    Args:
        key: names it.
        num_bytes: of the whole, as offered.
        expected: digest of the whole.
    """

    def __init__(self, key: str, num_bytes: int, expected: str) -> None:
        self.key, self.num_bytes, self.expected = key, num_bytes, expected
        self._buffer = bytearray(num_bytes)
        self.received = 0
        """Bytes that are here, from the first on."""

    @property
    def complete(self) -> bool:
        """Whether all bytes are here."""
        return self.received == self.num_bytes

    def take(self, piece: Piece, payload: memoryview) -> None:
        """Add a piece.

        Raises:
            TransferError: it does not fit, or its bytes were changed on the way; all before it stays.
        """
        if piece.key != self.key:
            raise TransferError(f"a piece of {piece.key} where one of {self.key} was awaited")
        if piece.offset != self.received or not 0 < len(payload) <= self.num_bytes - self.received:
            raise TransferError(
                f"{len(payload)} bytes at {piece.offset} of {self.num_bytes}, where {self.received} are here"
            )
        if crc32(payload) != piece.crc32:
            raise TransferError(f"bytes {piece.offset} to {piece.offset + len(payload)} were changed on the way")
        self._buffer[self.received : self.received + len(payload)] = payload
        self.received += len(payload)

    def whole(self) -> memoryview:
        """All of it.

        Raises:
            TransferError: it is not what was offered; everything is to be sent again.
        """
        assert self.complete, "asked for before it was complete"
        if digest(self._buffer) != self.expected:
            self.received = 0
            raise TransferError(f"{self.num_bytes} bytes of {self.key} are not those that were offered")
        return memoryview(self._buffer)
