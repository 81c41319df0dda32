"""From the hub's word on who is in a generation to a connected group of these workers.

The one idea: each worker process offers one store for as long as it lives, and a generation uses its first member's,
under a prefix of its own; so the hub carries no tensors, needs no torch, and may be away while a generation trains.
"""

import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import msgspec
from torch.distributed import PrefixStore, Store, TCPStore

from ragtag.comm import process_exit
from ragtag.comm.elastic import ElasticGroup
from ragtag.comm.gloo import GlooTransport
from ragtag.comm.group import SoloGroup
from ragtag.comm.judge import Peers
from ragtag.comm.mesh_handshake import connect_mesh
from ragtag.comm.passing import Inner
from ragtag.comm.rendezvous import Introduction, boot_id, check_addresses, clone, local_address, resolved
from ragtag.comm.ring_group import RingGroup
from ragtag.comm.standing import Forming
from ragtag.comm.transport import Transport, TransportError
from ragtag.core.errors import PeerLost, SettingError
from ragtag.core.hub_address import hub_address
from ragtag.core.within import within
from ragtag.hub.client import HubClient
from ragtag.hub.frames import Go, Hello, Member

T = TypeVar("T")

_LEAST_FORMING_S = 5.0
_taken = False
"""This process is a worker of a run already."""


class Links(Protocol):
    """Links that this machine's workers pretend to have between them, as numbered by their local ranks."""

    def limit_transport(self, transport: Any, devices: Sequence[int | None]) -> Any:
        """The transport, with messages to ranks that are these devices (None: of another machine) made late."""
        ...

    def message_delay_s(self, peer: int, num_bytes: int) -> float:
        """How long a message to device `peer`, handed over now, is on its way; in seconds."""
        ...


def connect_elastic(
    patience_s: float, version: str, environ: Mapping[str, str] = os.environ, links: Links | None = None
) -> ElasticGroup:
    """Connect to the hub that $RAGTAG_HUB names; the group's first `regroup` takes part in the run.

    `version` is ragtag's; the hub takes workers of its own version only. `links` to other workers of this machine are
    emulated; those to other machines are what they are.

    Reads RAGTAG_HUB (host:port), RAGTAG_TOKEN, RAGTAG_RUN, RAGTAG_WORKER (its name), LOCAL_RANK and LOCAL_WORLD_SIZE.

    Raises:
        SettingError: this process is in an elastic run already.
        LaunchError: nobody answers there, or the hub does not take this worker.
        PeerLost, PeerFailed: the run ended first.
    """
    global _taken
    if _taken:
        raise SettingError(
            "this script makes a second Trainer, and an elastic run is of one. Put the other training into a script of "
            "its own, or launch this one with --fixed."
        )
    _taken = True
    address, port = hub_address(environ["RAGTAG_HUB"])
    own_address = local_address(resolved(address, port, "RAGTAG_HUB"), port)
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    store, store_port = _offer_store(own_address, patience_s)
    host = environ.get("RAGTAG_HOSTNAME") or socket.gethostname()
    member = Member(
        inc=secrets.token_hex(8),
        name=environ.get("RAGTAG_WORKER") or f"{host}/{local_rank}",
        host=host,
        address=own_address,
        store_port=store_port,
        boot_id=boot_id(),
        local_rank=local_rank,
    )
    run = environ.get("RAGTAG_RUN", "run")
    group = ElasticGroup(
        member=member,
        patience_s=patience_s,
        form=lambda go, rank, forming: form(
            go, rank, forming, run=run, own_store=store, patience_s=patience_s, links=links
        ),
        where=f"the hub at {address}:{port}",
        may_leave=environ.get("RAGTAG_GUEST") == "1",
    )
    hello = Hello(
        run=run,
        version=version,
        member=member,
        generation=0,
        has_state=False,
        expected=int(environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    client = HubClient(
        address,
        port,
        environ.get("RAGTAG_TOKEN", ""),
        hello=lambda: _hello_again(hello, group),
        on_frame=group.hear,
        beat=group.beat,
        patience_s=patience_s,
    )
    group.attach(client)
    process_exit.guard(group, always=True)
    # A generation that was left may still have a thread inside the network, and so has the store of this process.
    process_exit.expect_stuck_thread()
    return group


def _hello_again(hello: Hello, group: ElasticGroup) -> Hello:
    return msgspec.structs.replace(hello, generation=group.generation, has_state=group.standing.has_state)


def form(
    go: Go,
    rank: int,
    forming: Forming,
    *,
    run: str,
    own_store: Store,
    patience_s: float,
    links: Links | None = None,
) -> Inner:
    """Connect the members of `go` as their rank `rank`.

    Args:
        forming: says whether the generation is over already, and takes the group as soon as it can be abandoned.
        own_store: what this process offers; used where it is the first member.
        links: emulated ones between this machine's workers.

    Raises:
        TransportError, PeerLost, LaunchError: they did not connect.
    """
    members = go.members
    if len(members) == 1:
        return AloneGroup(patience_s, members[0].host)
    first, own = members[0], members[rank]
    introductions = [
        Introduction(rank=place, host=each.host, boot_id=each.boot_id, address=each.address, nonce="")
        for place, each in enumerate(members)
    ]
    check_addresses(introductions, first.address)
    timeout_s = 11 * patience_s + 5
    forming_s = max(patience_s, _LEAST_FORMING_S)
    if rank == 0:
        # Never its own client, which a thread that an earlier generation has left behind may hold for long.
        stores = [clone(own_store) for _ in range(3)]
    else:
        limit = timedelta(seconds=forming_s)
        opened = _from_first(
            forming, lambda: TCPStore(first.address, first.store_port, None, False, limit, False), forming_s
        )
        stores = [opened, *(_from_first(forming, lambda: clone(opened), forming_s) for _ in range(2))]
    for store in stores:
        store.set_timeout(timedelta(seconds=timeout_s))
    prefix = f"ragtag/{run}/{go.generation}"
    unreached: list[int | None] = []
    devices = [each.local_rank if (each.host, each.boot_id) == (own.host, own.boot_id) else None for each in members]

    def connect_sockets() -> dict[int, socket.socket]:
        client = PrefixStore(f"{prefix}/control", stores[0])
        try:
            return connect_mesh(client, rank, len(members), address=own.address, timeout_s=forming_s)
        except TransportError as error:
            unreached.append(error.unreached)
            raise

    def open_transport() -> Transport:
        client = PrefixStore(f"{prefix}/data", stores[0])
        transport = GlooTransport(client, rank, len(members), timeout_s=timeout_s, address=own.address)
        return transport if links is None else links.limit_transport(transport, devices)

    def delay_s(peer: int, num_bytes: int) -> float:
        number = devices[peer]
        return 0.0 if links is None or number is None else links.message_delay_s(number, num_bytes)

    group = RingGroup(
        peers=Peers(
            rank=rank,
            hosts=tuple(each.host for each in members),
            patience_s=patience_s,
            store_rank=0,
            store_name=f"{first.address}:{first.store_port}",
        ),
        clients=(PrefixStore(prefix, stores[1]), PrefixStore(prefix, stores[2])),
        claims=PrefixStore(prefix, stores[0]),
        connect_sockets=connect_sockets,
        open_transport=open_transport,
        delay_s=None if links is None else delay_s,
        local_rank=own.local_rank,
    )
    forming.take(group)
    try:
        group.open()
    except BaseException as error:
        threading.Thread(target=group.close, name="ragtag-leaving", daemon=True).start()
        if isinstance(error, PeerLost) and error.rank is None and unreached:
            error.rank = unreached[0]
        raise
    return group


class AloneGroup(SoloGroup):
    """A generation of one, until somebody joins."""

    def abandon(self, reason: str) -> None:
        """Make `failure` say so; there is nobody to wait for."""
        self.failure = PeerLost(reason)


def _offer_store(address: str, patience_s: float) -> tuple[TCPStore, int]:
    """The store that this process hosts while it lives, on one interface, and its port."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen()
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=max(1.0, 10 * patience_s))
    return TCPStore(address, port, None, True, timeout, False, master_listen_fd=listener.detach()), port


def _from_first(forming: Forming, question: Callable[[], T], timeout_s: float) -> T:
    """Return what the first member's store answers to `question`, or raise TransportError."""
    try:
        return within(timeout_s, question, given_up=forming.broken)
    except TimeoutError:
        raise TransportError("the first member's store did not answer in time", peer=0, timed_out=True) from None
    except Exception as error:
        text = f"the first member's store does not answer ({str(error).splitlines()[0]})"
        raise TransportError(text, peer=0) from None
