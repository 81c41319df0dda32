"""Answers other doctors: facts, clock, echoes, a port like training's, and calls to third hosts on their behalf.

The one idea: whoever does not prove the token within seconds gets nothing, and whoever does gets a bounded number of
bounded answers; a *door* (the port that the system chose) only echoes.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ragtag.doctor.bounded import each
from ragtag.doctor.caller import CALL_TIMEOUT_S, call
from ragtag.doctor.facts import HostFacts, Way
from ragtag.doctor.frames import (
    AskCalls,
    AskClock,
    AskDoor,
    AskFacts,
    Called,
    Clock,
    Door,
    Echo,
    Facts,
    FrameError,
    Refused,
    Reply,
    Request,
    Target,
    TokenError,
    greet_caller,
    receive,
    send,
)
from ragtag.doctor.interfaces import plain

log = logging.getLogger("ragtag")

MOST_TARGETS = 64
"""Calls on behalf of one request, all at once."""
_MOST_CALLERS = 128
_MOST_REQUESTS = 200
_IDLE_S = 30.0
"""A caller that says nothing for so long has gone."""
_REPLY_TIMEOUT_S = 5.0


def bind(address: str, port: int) -> socket.socket:
    """Return a socket bound to `address`, which is numbers; empty: all of this host's. Nothing connects before listen.

    Raises:
        OSError: the port is taken, or the address is not this host's.
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
    else:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return _bound(family, address, port)
    except OSError:
        # IPv6 may be known to Python and switched off in the kernel or in this namespace.
        if address or family == socket.AF_INET:
            raise
        return _bound(socket.AF_INET, address, port)


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1 if address else 0)
        listener.bind((address, port))
    except BaseException:
        listener.close()
        raise
    return listener


class Listener:
    """Serves callers in threads of its own until it is closed.

    Args:
        bound: a bound socket, which the listener owns from now on.
        token: what callers must prove.
        facts: this host's; None: a door, which only echoes.
        host: this host's name.
        clock: time of day in seconds since 1970.
        event: called with a line for people, from any thread.

    Raises:
        OSError: somebody else began to listen at this port first.
    """

    def __init__(
        self,
        bound: socket.socket,
        *,
        token: str,
        facts: HostFacts | None,
        host: str,
        clock: Callable[[], float] = time.time,
        event: Callable[[str], None] = log.info,
    ) -> None:
        self._socket = bound
        self._token = token
        self._facts = facts
        self._host = host
        self._clock = clock
        self._event = event
        self._free = threading.Semaphore(_MOST_CALLERS)
        self._closed = False
        self.num_callers = 0
        """Those that proved the token."""
        self.last_heard_s = time.monotonic()
        bound.listen(128)
        self.address = plain(str(bound.getsockname()[0]))
        self.port = int(bound.getsockname()[1])
        threading.Thread(target=self._accept, name="ragtag-doctor-listen", daemon=True).start()

    def close(self) -> None:
        """Listen no more. Conversations that are under way end by themselves."""
        self._closed = True
        # Closing alone does not wake a thread that is in accept.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, caller = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # no file descriptor left, or a caller that is gone already
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            arguments = (connection, plain(str(caller[0])))
            threading.Thread(target=self._serve, args=arguments, name="ragtag-doctor-serve", daemon=True).start()

    def _serve(self, connection: socket.socket, caller: str) -> None:
        doors: dict[str, Listener] = {}
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet_caller(connection, self._token, self._host, deadline_s=time.monotonic() + CALL_TIMEOUT_S)
            self.num_callers += 1
            if self._facts is not None:
                self._event(f"called by {caller}")
            for _ in range(_MOST_REQUESTS):
                self.last_heard_s = time.monotonic()
                request: Request = receive(connection, Request, deadline_s=time.monotonic() + _IDLE_S)
                reply = self._reply(request, connection, doors)
                send(connection, reply, deadline_s=time.monotonic() + _REPLY_TIMEOUT_S)
        except TokenError:
            self._event(f"{caller} called with another token and was turned away")
        except (OSError, FrameError) as error:
            log.debug("doctor: conversation with %s ended: %s", caller, error)
        finally:
            connection.close()
            for door in doors.values():
                door.close()
            self._free.release()

    def _reply(self, request: Request, connection: socket.socket, doors: dict[str, "Listener"]) -> Reply:
        if isinstance(request, Echo):
            return request
        if self._facts is None:
            return Refused("this port only echoes")
        if isinstance(request, AskFacts):
            return Facts(self._facts)
        if isinstance(request, AskClock):
            return Clock(self._clock())
        if isinstance(request, AskDoor):
            address = plain(str(connection.getsockname()[0]))
            try:
                if address not in doors:
                    doors[address] = open_door(address, token=self._token, host=self._host)
            except OSError as error:
                return Refused(f"cannot listen on {address}: {error.strerror}")
            return Door(address, doors[address].port)
        assert isinstance(request, AskCalls)
        if len(request.targets) > MOST_TARGETS:
            return Refused(f"{len(request.targets)} targets; at most {MOST_TARGETS} in one request")
        return Called(call_all(self._host, request.targets, self._token))


def open_door(address: str, *, token: str, host: str) -> Listener:
    """Return a listener at a port that the system chooses, as a rank of a training does. OSError: it cannot."""
    return Listener(bind(address, 0), token=token, facts=None, host=host)


def call_all(source: str, targets: tuple[Target, ...], token: str) -> tuple[Way, ...]:
    """Return how calling each of at most MOST_TARGETS went; within CALL_TIMEOUT_S."""

    def try_one(target: Target) -> Way:
        way, conversation = call(source, target, token)
        if conversation is not None:
            conversation.close()
        return way

    return tuple(each(targets, try_one))
