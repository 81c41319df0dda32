"""What both ends of a connection to the hub share: the token, how silence is counted, and no second log.

The one idea: a cut link shows within the patience, not within the quarter of an hour that TCP takes by default; but
only the silence that this process was there to hear counts.
"""

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ragtag.core.errors import SettingError


def drop_unacknowledged(sock: socket.socket, after_s: float) -> None:
    """Let the kernel break the connection when what was sent is not acknowledged for `after_s` seconds."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        # A connection that was reset meanwhile takes no options.
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, max(1, int(after_s * 1000)))


@cache
def silent_logger() -> logging.Logger:
    """A logger that writes nothing, for the WebSocket library: what matters is logged here, once and in our words."""
    logger = logging.Logger("websockets-of-ragtag")
    logger.addHandler(logging.NullHandler())
    logger.setLevel(logging.CRITICAL + 1)
    return logger


def check_token(token: str) -> None:
    """Raise SettingError where `token` is empty or cannot stand in an HTTP header."""
    if not token:
        raise SettingError(
            "RAGTAG_TOKEN is not set, and a hub takes nobody without it. Copy the whole line that `ragtag launch` "
            "printed on the first machine, or type `export RAGTAG_TOKEN=...` with its token."
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise SettingError("RAGTAG_TOKEN holds a blank, or a character that is no ASCII letter, digit or sign.")


def server_tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """TLS with this certificate chain; None: there is none.

    Raises:
        SettingError: a file cannot be read, or they do not belong together.
    """
    if certificate is None:
        if key is not None:
            raise SettingError(f"--key {key} needs its certificate: --certificate FILE.")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(f"--certificate {certificate}: {error.strerror or error}.") from error
    return context


def client_tls(told: str) -> ssl.SSLContext | None:
    """TLS towards a hub, as $RAGTAG_TLS or $RAGTAG_OUTER_TLS says; None where that is empty: in the clear.

    "system" trusts who the system trusts, for the hub's name. A path names the certificate (or its authority's) that
    alone is trusted; the name in it does not count then, since hubs are mostly reached by number.

    Raises:
        SettingError: the file cannot be read, or holds no certificate.
    """
    if not told:
        return None
    if told == "system":
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(told)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(f"RAGTAG_TLS = '{told}': {error.strerror or error}. Name a PEM file.") from error
    return context


class AwakeClock:
    """Seconds in which this process itself was running.

    Whoever was frozen, or held up by its disk, must not hold the time in which it heard nobody against the others:
    between two readings at most `longest_gap_s` seconds pass. Any thread may read it.
    """

    def __init__(self, *, longest_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_gap_s, self._clock = longest_gap_s, clock
        self._read_s, self._awake_s = clock(), 0.0
        self._lock = threading.Lock()
        self.missed_s = 0.0
        """Seconds that did not count, in all."""

    def __call__(self) -> float:
        """Return the seconds since the first reading."""
        with self._lock:
            now_s = self._clock()
            counted_s = min(now_s - self._read_s, self._longest_gap_s)
            self._awake_s += counted_s
            self.missed_s += now_s - self._read_s - counted_s
            self._read_s = now_s
            return self._awake_s


async def first_to_end(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one of them ends; the others are cancelled. Raises what the first, in this order, has raised."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if task in done:
            task.result()
