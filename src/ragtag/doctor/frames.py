"""The doctor's wire: frames of JSON with a length before each, typed, limited, and never waited for without end.

The one idea: both ends prove that they know the token by answering the other's random challenge, so the token itself
is never sent and a stranger gets no more than a challenge.
"""

import hmac
import secrets
import socket
import struct
import time
from typing import Any

import msgspec

from ragtag.doctor.facts import HostFacts, Way

PROTOCOL = 1
FRAME_LIMIT_BYTES = 1 << 20
STRANGER_LIMIT_BYTES = 1024
"""Most bytes of a frame from somebody who has not proven the token."""
_LENGTH = struct.Struct("!I")


class FrameError(Exception):
    """What came is no frame of this protocol."""


class TokenError(Exception):
    """The other end does not have our token."""


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The listener's first word."""

    protocol: int
    nonce: str


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The caller's proof, and its own challenge."""

    nonce: str
    proof: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The listener's proof and its host name."""

    proof: str
    host: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The listener says why it hangs up."""

    why: str


class AskFacts(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Facts`."""


class Facts(msgspec.Struct, frozen=True, tag=True):
    """What the listener knows about its host."""

    facts: HostFacts


class AskClock(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Clock`."""


class Clock(msgspec.Struct, frozen=True, tag=True):
    """The listener's time of day, in seconds since 1970."""

    time_s: float


class Echo(msgspec.Struct, frozen=True, tag=True):
    """Sent back as it came."""

    content: str


class AskDoor(msgspec.Struct, frozen=True, tag=True):
    """Asks for a port that the system chooses, on the address where this connection arrived."""


class Door(msgspec.Struct, frozen=True, tag=True):
    """Where the listener now listens besides."""

    address: str
    port: int


class Target(msgspec.Struct, frozen=True):
    """Somebody to call."""

    name: str
    address: str
    port: int
    control: bool


class AskCalls(msgspec.Struct, frozen=True, tag=True):
    """Asks the listener to call each target with the same token; answered by `Called`."""

    targets: tuple[Target, ...]


class Called(msgspec.Struct, frozen=True, tag=True):
    """How it went, in the order of the targets."""

    ways: tuple[Way, ...]


Request = AskFacts | AskClock | Echo | AskDoor | AskCalls
Reply = Facts | Clock | Echo | Door | Called | Refused


def send(connection: socket.socket, message: msgspec.Struct, *, deadline_s: float) -> None:
    """Send one frame before the monotonic `deadline_s`; OSError (TimeoutError) if that fails."""
    content = msgspec.json.encode(message)
    if len(content) > FRAME_LIMIT_BYTES:
        raise FrameError(f"a frame of {len(content)} bytes is over {FRAME_LIMIT_BYTES}")
    connection.settimeout(_left_s(deadline_s))
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket, kind: Any, *, deadline_s: float, limit_bytes: int = FRAME_LIMIT_BYTES) -> Any:
    """Return the next frame, a `kind` (a type or a union of them), whole before the monotonic `deadline_s`.

    Raises:
        OSError: the connection broke; TimeoutError: the deadline passed.
        FrameError: it ended, announces more than `limit_bytes`, or is no `kind`.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline_s))
    if length > limit_bytes:
        raise FrameError(f"a frame of {length} bytes is announced, over {limit_bytes}")
    try:
        return msgspec.json.decode(_exactly(connection, length, deadline_s), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a frame cannot be read: {error}") from None


def greet_caller(connection: socket.socket, token: str, host: str, *, deadline_s: float) -> None:
    """Listener's half of the handshake. Raises TokenError, FrameError or OSError; the caller then hangs up."""
    nonce = secrets.token_hex(16)
    send(connection, Challenge(protocol=PROTOCOL, nonce=nonce), deadline_s=deadline_s)
    answer = receive(connection, Answer, deadline_s=deadline_s, limit_bytes=STRANGER_LIMIT_BYTES)
    if not hmac.compare_digest(_proof(token, "caller", nonce, answer.nonce), answer.proof.encode()):
        send(connection, Refused(why="token"), deadline_s=deadline_s)
        raise TokenError("a caller has another token")
    proof = _proof(token, "listener", nonce, answer.nonce).decode()
    send(connection, Welcome(proof=proof, host=host), deadline_s=deadline_s)


def greet_listener(connection: socket.socket, token: str, *, deadline_s: float) -> str:
    """Caller's half of the handshake; return the listener's host name.

    Raises:
        TokenError: the tokens differ.
        FrameError: whoever listens is no doctor of this protocol.
        OSError: the connection broke; TimeoutError: the deadline passed.
    """
    challenge = receive(connection, Challenge, deadline_s=deadline_s, limit_bytes=STRANGER_LIMIT_BYTES)
    if challenge.protocol != PROTOCOL:
        raise FrameError(f"its doctor speaks protocol {challenge.protocol}, this one {PROTOCOL}; install one ragtag")
    nonce = secrets.token_hex(16)
    proof = _proof(token, "caller", challenge.nonce, nonce).decode()
    send(connection, Answer(nonce=nonce, proof=proof), deadline_s=deadline_s)
    word = receive(connection, Welcome | Refused, deadline_s=deadline_s, limit_bytes=STRANGER_LIMIT_BYTES)
    if isinstance(word, Refused):
        raise TokenError("it has another token")
    if not hmac.compare_digest(_proof(token, "listener", challenge.nonce, nonce), word.proof.encode()):
        raise TokenError("it does not know our token")
    return word.host


def _proof(token: str, role: str, listener_nonce: str, caller_nonce: str) -> bytes:
    text = f"ragtag doctor {role} {listener_nonce} {caller_nonce}"
    return hmac.digest(token.encode(), text.encode(), "sha256").hex().encode()


def _exactly(connection: socket.socket, size: int, deadline_s: float) -> bytes:
    content = bytearray()
    while len(content) < size:
        connection.settimeout(_left_s(deadline_s))
        more = connection.recv(min(size - len(content), 1 << 16))
        if not more:
            raise FrameError("it hung up" if not content else "it hung up in the middle of a frame")
        content += more
    return bytes(content)


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
