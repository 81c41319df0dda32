"""Connects every pair of ranks by one TCP socket, and lets nobody else in.

The one idea: the store says where each rank listens and the secret that a caller must present there, so whoever can
read the store is a rank and everybody else is closed and logged. Secrets go over the wire in the clear: they keep
strangers and mistakes out of a trusted network, they don't encrypt it.
"""

import hmac
import logging
import secrets
import selectors
import socket
import struct
import time
from collections import deque

import msgspec
from torch.distributed import Store

from ragtag.comm.transport import TransportError

log = logging.getLogger("ragtag")

_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"!8s{_TOKEN_BYTES}sI")
_MAGIC = b"ragtag1\n"
_STRANGERS_AT_ONCE = 64


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank listens, and what a caller must present."""

    address: str
    port: int
    token: bytes


def connect_mesh(
    store: Store, rank: int, world_size: int, *, address: str, timeout_s: float
) -> dict[int, socket.socket]:
    """Return a connected socket for each other rank. The higher rank of a pair calls the lower one.

    Both ends prove that they have read the store: the caller presents the listener's token, which answers with the
    caller's. Only the interface of `address` listens, on a port of its own, and only until all ranks are connected.

    Args:
        store: where ranks publish where they listen; give each mesh a `PrefixStore` of its own, used by one thread.
        rank: this end's.
        world_size: number of ranks.
        address: local address to listen on.
        timeout_s: bounds all of it, in seconds; what the store takes is bounded by the store's own timeout.

    Raises:
        TransportError: not all ranks connected in time, with the pair, address and port that failed.
    """
    deadline_s = time.monotonic() + timeout_s
    own = secrets.token_bytes(_TOKEN_BYTES)
    sockets: dict[int, socket.socket] = {}
    # Not socket.create_server: it looks up names, and would take every interface for an empty address.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))
            listener.listen(max(128, world_size))
            listening = Listening(address=address, port=listener.getsockname()[1], token=own)
            store.set(_key(rank), msgspec.json.encode(listening).decode())
            for peer in range(rank):
                sockets[peer] = _call(rank, peer, _look_up(store, rank, peer), deadline_s)
            expected = range(rank + 1, world_size)
            _accept_callers(listener, rank, expected, own, deadline_s, sockets)
            for peer in expected:
                _present(sockets[peer], _look_up(store, rank, peer).token, rank)
        for peer in range(rank):
            _check_answer(sockets[peer], rank, peer, own, deadline_s)
    except BaseException as error:
        for connected in sockets.values():
            connected.close()
        if isinstance(error, OSError):
            text = f"rank {rank} lost a connection while the ranks were connecting: {error.strerror or error}"
            raise TransportError(text, peer=None) from None
        raise
    for connected in sockets.values():
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets


def _key(rank: int) -> str:
    return f"listens/{rank}"


def _look_up(store: Store, rank: int, peer: int) -> Listening:
    try:
        return msgspec.json.decode(store.get(_key(peer)), type=Listening)
    except RuntimeError as error:
        text = f"rank {rank} waits for rank {peer} to listen ({str(error).splitlines()[0]})"
        raise TransportError(text, peer=None, timed_out=True) from None


def _call(rank: int, peer: int, there: Listening, deadline_s: float) -> socket.socket:
    try:
        # Numbers only, so that no name server is asked.
        connected = socket.create_connection((there.address, there.port), timeout=_left_s(deadline_s))
    except OSError as error:
        raise TransportError(
            f"rank {rank} cannot reach rank {peer} at {there.address}, port {there.port}: "
            f"{error.strerror or error}. Does a firewall close that host's ports to its peers?",
            peer=None,
            timed_out=isinstance(error, TimeoutError),
            unreached=peer,
        ) from None
    _present(connected, there.token, rank)
    return connected


def _present(connected: socket.socket, token: bytes, rank: int) -> None:
    # Fits the buffer of a new connection: this does not wait for the other end.
    connected.sendall(_HELLO.pack(_MAGIC, token, rank))


def _check_answer(connected: socket.socket, rank: int, peer: int, own: bytes, deadline_s: float) -> None:
    content = b""
    while len(content) < _HELLO.size:
        connected.settimeout(_left_s(deadline_s))
        more = connected.recv(_HELLO.size - len(content))
        if not more:
            raise TransportError(f"rank {peer} refused the connection of rank {rank}, or ended", peer=None)
        content += more
    if _presented(content, own) != peer:
        raise TransportError(f"who answered rank {rank} at rank {peer}'s port is not rank {peer}", peer=None)


def _accept_callers(
    listener: socket.socket,
    rank: int,
    expected: range,
    own: bytes,
    deadline_s: float,
    sockets: dict[int, socket.socket],
) -> None:
    """Add to `sockets` each of the `expected` ranks once it has presented `own`; close all other callers."""
    unknown: deque[tuple[socket.socket, bytearray]] = deque()
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, None)
        try:
            while missing := [peer for peer in expected if peer not in sockets]:
                if time.monotonic() >= deadline_s:
                    address, port = listener.getsockname()[:2]
                    raise TransportError(
                        f"rank {rank} listens on {address}, port {port}, but these ranks did not connect: "
                        f"{', '.join(map(str, missing))}. Does a firewall close this host's ports to its peers?",
                        peer=None,
                        timed_out=True,
                        unreached=missing[0] if len(missing) == 1 else None,
                    )
                for key, _ in selector.select(_left_s(deadline_s)):
                    if key.data is None:
                        caller = _accepted(listener)
                        if caller is not None:
                            unknown.append((caller, bytearray()))
                            selector.register(caller, selectors.EVENT_READ, unknown[-1])
                        continue
                    caller, content = key.data
                    complete, fault = _hear(caller, content)
                    if complete or fault:
                        unknown.remove(key.data)
                        selector.unregister(caller)
                        peer = _presented(bytes(content), own) if complete else None
                        if peer is not None and peer in missing and peer not in sockets:
                            caller.setblocking(True)
                            sockets[peer] = caller
                        else:
                            _turn_away(caller, rank, fault or "did not present this run's token and a missing rank")
                while len(unknown) > _STRANGERS_AT_ONCE:
                    caller, _ = unknown.popleft()
                    selector.unregister(caller)
                    _turn_away(caller, rank, "was one of too many that did not say who they are")
        finally:
            for caller, _ in unknown:
                _turn_away(caller, rank, "did not say who it is")


def _accepted(listener: socket.socket) -> socket.socket | None:
    try:
        caller, _ = listener.accept()
    except OSError:
        return None  # gone again before it was accepted
    caller.setblocking(False)
    return caller


def _hear(caller: socket.socket, content: bytearray) -> tuple[bool, str]:
    """Read on; return whether `content` is complete, and what is wrong with the caller."""
    try:
        more = caller.recv(_HELLO.size - len(content))
    except BlockingIOError:
        return False, ""
    except OSError as error:
        return False, f"broke its connection ({error.strerror})"
    content += more
    return len(content) == _HELLO.size, "" if more else "left before it had said who it is"


def _presented(content: bytes, own: bytes) -> int | None:
    """Return the rank of a caller that presents `own`; None: it does not."""
    magic, token, rank = _HELLO.unpack(content)
    # Both compared in constant time, whatever the outcome of the first.
    return rank if hmac.compare_digest(magic + token, _MAGIC + own) else None


def _turn_away(caller: socket.socket, rank: int, why: str) -> None:
    try:
        address, port = caller.getpeername()[:2]
        name = f"{address}, port {port}"
    except OSError:
        name = "an address unknown"
    log.warning("rank %d: closed a connection from %s, which %s", rank, name, why)
    caller.close()


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())
