"""What travels over the control connections: frames that say which call they belong to.

The one idea: a frame carries the number and the kind of its call and what its rank is doing, so that ranks whose calls
differ notice it with the first frame, and each can tell a person who is where.
"""

import struct
import zlib
from typing import NamedTuple

PAYLOAD_LIMIT_BYTES = 64 << 20
"""Most bytes of one payload: a hundred times the names of ten thousand parameters, and no danger to a host's memory."""

_HEADER = struct.Struct("!QIHII")
_DOING_LIMIT_BYTES = 400
_ASIDE_LIMIT_BYTES = 1 << 17


class Frame(NamedTuple):
    """One rank's part of one call."""

    number: int
    """Counts the calls of a rank from 1."""
    kind: int
    """Equal, by `kind_of`, where ranks make the same call."""
    doing: str
    """For people."""
    payload: bytes
    aside: bytes = b""
    """What rides along, and is no part of the call."""


class FrameError(Exception):
    """What came is no frame."""


def kind_of(call: str) -> int:
    """Return the 32-bit hash that stands for `call`, the text of what all ranks must do alike."""
    return zlib.crc32(call.encode())


def encode(frame: Frame) -> bytes:
    """Return the bytes of `frame`; its payload must be within PAYLOAD_LIMIT_BYTES."""
    assert len(frame.payload) <= PAYLOAD_LIMIT_BYTES, f"a payload of {len(frame.payload)} bytes"
    doing, aside = frame.doing.encode(errors="replace")[:_DOING_LIMIT_BYTES], frame.aside[:_ASIDE_LIMIT_BYTES]
    header = _HEADER.pack(frame.number, frame.kind, len(doing), len(frame.payload), len(aside))
    return b"".join((header, doing, frame.payload, aside))


class FrameReader:
    """Puts one connection's bytes together to frames, however they were cut."""

    def __init__(self) -> None:
        self._content = bytearray()

    def feed(self, content: bytes) -> list[Frame]:
        """Return the frames that are complete with `content`.

        Raises:
            FrameError: a header announces more than a frame may hold.
        """
        self._content += content
        frames = []
        while len(self._content) >= _HEADER.size:
            number, kind, num_doing, num_payload, num_aside = _HEADER.unpack_from(self._content)
            if num_doing > _DOING_LIMIT_BYTES or num_payload > PAYLOAD_LIMIT_BYTES:
                raise FrameError(f"a frame of {num_payload} bytes is announced, over {PAYLOAD_LIMIT_BYTES}")
            if num_aside > _ASIDE_LIMIT_BYTES:
                raise FrameError(f"{num_aside} bytes beside a frame are announced, over {_ASIDE_LIMIT_BYTES}")
            middle = _HEADER.size + num_doing
            behind = middle + num_payload
            end = behind + num_aside
            if len(self._content) < end:
                break
            doing = self._content[_HEADER.size : middle].decode(errors="replace")
            payload, aside = bytes(self._content[middle:behind]), bytes(self._content[behind:end])
            frames.append(Frame(number, kind, doing, payload, aside))
            del self._content[:end]
        return frames
