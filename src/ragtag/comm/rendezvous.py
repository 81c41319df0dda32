"""How ranks find each other: from an environment to a connected `Group`, or one error that says what to type.

The one idea: rank 0 invents the name under which a group meets, and tells it to each rank that asks with a one-time
number; so a restarted run, or the next group of the same process, never reads a stale key.
"""

import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch.distributed import PrefixStore, Store, TCPStore

from ragtag.comm import process_exit
from ragtag.comm.environment import Place, read_environment
from ragtag.comm.gloo import GlooTransport
from ragtag.comm.group import Group, SoloGroup
from ragtag.comm.judge import Peers
from ragtag.comm.link_times import boot_id
from ragtag.comm.mesh_handshake import connect_mesh
from ragtag.comm.ring_group import RingGroup
from ragtag.comm.socket_mesh import Delay
from ragtag.comm.transport import Transport
from ragtag.core.errors import LaunchError
from ragtag.core.hub_address import is_loopback
from ragtag.core.within import within

T = TypeVar("T")

_POLL_S = 0.005
_LEAST_MEETING_S = 15.0
"""torch looks up the host name of each connection it makes (2.13): 5 s whenever a name server does not answer."""
_sequence = itertools.count()
_hosted: dict[tuple[str, int], TCPStore] = {}
"""Stores that this process hosts, by address and port: they serve all groups that it forms, one after another."""


class Introduction(msgspec.Struct, frozen=True, kw_only=True):
    """What each rank tells the others first."""

    rank: int
    host: str
    boot_id: str
    """Tells machines apart that have the same host name."""
    address: str
    """Where it listens for data."""
    nonce: str


def connect(
    patience_s: float,
    environ: Mapping[str, str] = os.environ,
    *,
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
    delay_s: Delay | None = None,
) -> Group:
    """Return the group that `environ` describes: torchrun's, `ragtag launch`'s, or (without one) a world of one.

    The group is guarded (see `process_exit`): whatever ends this script, the others hear of it. Ranks may come up to
    10 x `patience_s` seconds apart. The n-th call of a process meets the n-th of the others.
    To emulate slower links, `wrap` may put another transport around the one for tensors, and `delay_s` returns how much
    later a message of votes leaves, from its peer and bytes.

    Raises:
        LaunchError: the environment is incomplete, the port is taken, nobody answers, a rank is missing, or an
            address cannot be reached from other hosts.
        PeerLost, PeerFailed: another rank ended while the ranks were connecting.
    """
    place = read_environment(environ)
    if place is None or place.world_size == 1:
        return SoloGroup(patience_s, socket.gethostname())
    deadline_s = time.monotonic() + max(10 * patience_s, _LEAST_MEETING_S)
    sequence = next(_sequence)
    ip = resolved(place.address, place.port)
    # Before the meeting, because each connection may take long (see _LEAST_MEETING_S) and heartbeats start after it.
    store = _open_store(place, ip, patience_s, deadline_s)
    clones = [_asked(place, lambda: clone(store), deadline_s) for _ in range(2)]
    meeting = PrefixStore(f"ragtag/{place.run_id}/{sequence}", store)
    mine = Introduction(
        rank=place.rank,
        host=socket.gethostname(),
        boot_id=boot_id(),
        address=local_address(ip, place.port),
        nonce=secrets.token_hex(8),
    )
    generation, introductions = _asked(place, lambda: _meet(meeting, place, mine, deadline_s), deadline_s + 1.0)
    check_addresses(introductions, place.address)
    prefix = f"ragtag/{place.run_id}/{sequence}/{generation}"
    # Longer than any wait of the group, which so is always the first to give up, and says why.
    timeout_s = 11 * patience_s + 5
    store.set_timeout(timedelta(seconds=timeout_s))

    def connect_sockets() -> dict[int, socket.socket]:
        client = PrefixStore(f"{prefix}/control", store)
        return connect_mesh(
            client, place.rank, place.world_size, address=mine.address, timeout_s=max(10 * patience_s, _LEAST_MEETING_S)
        )

    def open_transport() -> Transport:
        client = PrefixStore(f"{prefix}/data", store)
        return wrap(GlooTransport(client, place.rank, place.world_size, timeout_s=timeout_s, address=mine.address))

    peers = Peers(
        rank=place.rank,
        hosts=tuple(each.host for each in introductions),
        patience_s=patience_s,
        store_rank=None if place.agent_hosts_store else 0,
        store_name=f"{place.address}:{place.port}",
    )
    group = RingGroup(
        peers=peers,
        clients=(PrefixStore(prefix, clones[0]), PrefixStore(prefix, clones[1])),
        claims=PrefixStore(prefix, store),
        connect_sockets=connect_sockets,
        open_transport=open_transport,
        delay_s=delay_s,
        local_rank=place.local_rank,
        on_close=process_exit.release,
    )
    process_exit.guard(group)
    group.open()
    return group


def check_addresses(introductions: Sequence[Introduction], master_address: str) -> None:
    """Raise LaunchError if ranks are on several machines and one of them listens on loopback only."""
    machines = {(each.host, each.boot_id) for each in introductions}
    for each in introductions:
        if len(machines) > 1 and is_loopback(each.address):
            raise LaunchError(
                f"Rank {each.rank} ({each.host}) would listen on {each.address}, which no other host can reach, but "
                f"the ranks are on {len(machines)} machines ({', '.join(sorted(host for host, _ in machines))}): "
                f"MASTER_ADDR={master_address} is a loopback address there. Set MASTER_ADDR (torchrun: --master-addr "
                f"or --rdzv-endpoint) to an address of rank 0's host that the others reach; "
                f"`ip -brief address` on that host lists them."
            )


def _meet(meeting: Store, place: Place, mine: Introduction, deadline_s: float) -> tuple[str, tuple[Introduction, ...]]:
    """Return the name of this generation and all introductions, by rank."""
    world = range(place.world_size)
    generation = mine.nonce if place.rank == 0 else ""
    answered: set[str] = set()

    def missing() -> list[int]:
        return [rank for rank in world if not meeting.check([f"{generation}/introduction/{rank}"])]

    def introduce() -> None:
        content = msgspec.json.encode(mine).decode()
        found = meeting.compare_set(f"{generation}/introduction/{mine.rank}", "", content).decode()
        if found != content:
            other = msgspec.json.decode(found, type=Introduction)
            raise LaunchError(
                f"Two processes are both RANK={mine.rank}: this one on {mine.host} and another one on {other.host}. "
                f"Give each process a RANK of its own, or start them with torchrun."
            )

    if place.rank == 0:
        introduce()
    else:
        meeting.set(f"hello/{place.rank}", mine.nonce)
    while True:
        if place.rank == 0:
            for rank in world[1:]:
                if meeting.check([f"hello/{rank}"]):
                    nonce = meeting.get(f"hello/{rank}").decode()
                    if nonce not in answered:
                        meeting.set(f"answer/{nonce}", generation)
                        answered.add(nonce)
        elif not generation and meeting.check([f"answer/{mine.nonce}"]):
            generation = meeting.get(f"answer/{mine.nonce}").decode()
            introduce()
        absent = missing() if generation else [0]
        if not absent:
            break
        if time.monotonic() >= deadline_s:
            ranks = ", ".join(str(rank) for rank in absent)
            raise LaunchError(
                f"Rank {place.rank} ({mine.host}) waited for {place.world_size} ranks at "
                f"{place.address}:{place.port}, but these did not come: {ranks}. Look at their output; are "
                f"WORLD_SIZE={place.world_size}, MASTER_ADDR and MASTER_PORT the same on every host? "
                f"If they only start slowly, raise patience_s."
            )
        time.sleep(_POLL_S)
    keys = [f"{generation}/introduction/{rank}" for rank in world]
    return generation, tuple(msgspec.json.decode(each, type=Introduction) for each in meeting.multi_get(keys))


def _open_store(place: Place, ip: str, patience_s: float, deadline_s: float) -> TCPStore:
    timeout = timedelta(seconds=max(1.0, 10 * patience_s))
    if place.rank == 0 and not place.agent_hosts_store:
        if (ip, place.port) not in _hosted:
            listener = _listening_socket(place, ip)
            # Without a socket of ours the store would listen on every interface.
            _hosted[ip, place.port] = TCPStore(
                ip, place.port, None, True, timeout, False, master_listen_fd=listener.detach()
            )
        return _hosted[ip, place.port]
    # torchrun's agent listens before its workers start; rank 0 may still be busy in the user's script.
    _await_listener(place, ip, time.monotonic() + patience_s * (1 if place.agent_hosts_store else 10))
    return _asked(place, lambda: TCPStore(ip, place.port, None, False, timeout, False), deadline_s)


def clone(store: Store) -> Store:
    """Return another client of the same store: one that waits blocks everybody else who uses it."""
    return store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # missing in torch's stubs


def _asked(place: Place, question: Callable[[], T], deadline_s: float) -> T:
    """Return what the store answers to `question`, or raise LaunchError."""
    try:
        return within(deadline_s - time.monotonic(), question)
    except (RuntimeError, TimeoutError) as error:
        if isinstance(error, TimeoutError):
            process_exit.expect_stuck_thread()
        raise LaunchError(
            f"Rank {place.rank} ({socket.gethostname()}): something listens at {place.address}:{place.port}, but it "
            f"does not answer as the store of this run ({str(error).splitlines()[0]}). Look at rank 0's output: did it "
            f"end, or is it still busy before this point? Or is MASTER_PORT={place.port} another program's port?"
        ) from None


def _listening_socket(place: Place, ip: str) -> socket.socket:
    if place.store_fd is not None:
        try:
            listener = socket.socket(fileno=place.store_fd)
            if listener.getsockname()[1] == place.port:
                return listener
            listener.detach()
        except OSError:
            pass
        raise LaunchError(
            f"RAGTAG_STORE_FD={place.store_fd} is not the socket of MASTER_PORT={place.port} that `ragtag launch` "
            f"hands to rank 0. Start the script with `ragtag launch`, or `unset RAGTAG_STORE_FD`."
        )
    listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ip, place.port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"Rank 0 ({socket.gethostname()}) cannot listen on MASTER_ADDR={place.address} ({ip}), "
            f"MASTER_PORT={place.port}: {error.strerror}. Set MASTER_ADDR to an address of this host and MASTER_PORT "
            f"to a free port, the same on every rank (torchrun: --master-addr, --master-port)."
        ) from None
    return listener


def _await_listener(place: Place, ip: str, deadline_s: float) -> None:
    pause_s = 0.02
    while True:
        try:
            socket.create_connection((ip, place.port), timeout=max(0.1, deadline_s - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() + pause_s >= deadline_s:
                raise LaunchError(
                    f"Rank {place.rank} ({socket.gethostname()}) finds nobody listening at MASTER_ADDR="
                    f"{place.address} ({ip}), MASTER_PORT={place.port}: {error.strerror or error}. Is rank 0 "
                    f"started, is its address right, and does a firewall let port {place.port} through? "
                    f"From this host, try `nc -vz {place.address} {place.port}`."
                ) from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.25)


def resolved(address: str, port: int, variable: str = "MASTER_ADDR") -> str:
    """Return the numeric address of a host, IPv4 where it has one. Raises LaunchError, naming the `variable`."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"{variable}={address!r} is not a known host name or address ({error}). "
            f"Set it to the address of rank 0's host; `getent hosts {address}` shows what this host knows."
        ) from None
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def local_address(ip: str, port: int) -> str:
    """Return this host's address on the interface that routes to `ip`; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, port))
        except OSError as error:
            raise LaunchError(f"{socket.gethostname()} has no route to {ip}: {error.strerror}.") from None
        return str(probe.getsockname()[0])
