"""When a message has crossed a link on which messages queue behind one another.

The one idea: one number says until when the link is busy. It lives in this process, or, where several ranks of one
host share a link, in a small locked file on the monotonic clock that all processes of a machine share.
"""

import os
import struct
import threading
from pathlib import Path
from typing import Protocol

from ragtag.core.cluster import Link

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None

_SECONDS = struct.Struct("<d")


def crossing(link: Link, *, now_s: float, busy_until_s: float, num_bytes: int) -> tuple[float, float]:
    """Return until when the link is busy with a message handed to it at `now_s`, and when that message has arrived.

    It starts when the link is free, occupies it for bytes / bandwidth, and is there a latency later.
    """
    send_s = num_bytes / link.bandwidth_bytes_per_s if link.bandwidth_bytes_per_s is not None else 0.0
    sent_s = max(now_s, busy_until_s) + send_s
    return sent_s, sent_s + link.latency_s


class LinkQueue(Protocol):
    """One direction of a link."""

    def reserve(self, now_s: float, num_bytes: int) -> float:
        """Take the next place for a message handed over at `now_s`; return when it has arrived."""
        ...


class LocalQueue:
    """A link that only this process uses."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._busy_until_s = float("-inf")
        self._lock = threading.Lock()

    def reserve(self, now_s: float, num_bytes: int) -> float:
        """Take the next place for a message handed over at `now_s`; return when it has arrived."""
        with self._lock:
            self._busy_until_s, arrival_s = crossing(
                self._link, now_s=now_s, busy_until_s=self._busy_until_s, num_bytes=num_bytes
            )
        return arrival_s


class SharedQueue:
    """A link that several processes of this machine use: `file` is the same for all of them.

    The file holds a time on the clock that callers pass to `reserve`, which must be one that processes share, as
    `time.monotonic` is on Linux. One from a clock of before a reboot is harmless: `now_s` bounds how far it is trusted.
    """

    _TRUST_S = 600.0

    def __init__(self, link: Link, file: Path) -> None:
        assert fcntl is not None, "ask `can_share` first"
        self._link = link
        self._lock = threading.Lock()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def reserve(self, now_s: float, num_bytes: int) -> float:
        """Take the next place for a message handed over at `now_s`; return when it has arrived."""
        assert fcntl is not None
        with self._lock:
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            try:
                content = os.pread(self._handle, _SECONDS.size, 0)
                busy_until_s = _SECONDS.unpack(content)[0] if len(content) == _SECONDS.size else now_s
                if busy_until_s > now_s + self._TRUST_S:
                    busy_until_s = now_s
                busy_until_s, arrival_s = crossing(
                    self._link, now_s=now_s, busy_until_s=busy_until_s, num_bytes=num_bytes
                )
                os.pwrite(self._handle, _SECONDS.pack(busy_until_s), 0)
            finally:
                fcntl.flock(self._handle, fcntl.LOCK_UN)
        return arrival_s

    def close(self) -> None:
        """Close the file; it stays, eight bytes long."""
        os.close(self._handle)


def can_share() -> bool:
    """Whether this system has the locks that `SharedQueue` needs."""
    return fcntl is not None
