"""Examines several hosts from one of them: who can talk to whom, in both directions, and how their clocks differ.

The one idea: two rounds of calls, each under one deadline. First this host calls every other at its doctor's port; then
every host, on this one's behalf, calls every other at a port the system chose, because that is where ranks listen.
"""

import time
from collections.abc import Callable, Sequence

import msgspec

from ragtag.doctor.bounded import each
from ragtag.doctor.caller import CALL_TIMEOUT_S, Conversation, call
from ragtag.doctor.facts import ClockOffset, HostFacts, Way
from ragtag.doctor.frames import (
    AskCalls,
    AskClock,
    AskDoor,
    AskFacts,
    Called,
    Clock,
    Door,
    Facts,
    FrameError,
    Target,
)
from ragtag.doctor.listener import Listener, call_all, open_door

_ASK_TIMEOUT_S = 2.0
_NUM_CLOCK_READINGS = 3


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about the other hosts."""

    hosts: tuple[HostFacts, ...]
    """Those that could be reached, under the names that `ways` use."""
    ways: tuple[Way, ...]
    clocks: tuple[ClockOffset, ...]


class _Peer(msgspec.Struct, kw_only=True):
    """One other host."""

    target: Target
    way: Way
    conversation: Conversation | None = None
    facts: HostFacts | None = None
    door: Door | None = None
    clock: ClockOffset | None = None

    @property
    def name(self) -> str:
        return self.facts.host if self.facts is not None else self.target.name


def examine(
    own_host: str,
    addresses: Sequence[tuple[str, int]],
    token: str,
    *,
    found: Callable[[Way], None] = lambda way: None,
    clock: Callable[[], float] = time.time,
) -> Examination:
    """Return what this host, called `own_host`, finds out about the doctors at `addresses`; in about 9 s at most.

    At most `listener.MOST_TARGETS` hosts. `found` is called from this thread with each way once its round is over.
    """
    targets = [Target(_typed(address, port), address, port, True) for address, port in addresses]
    peers = each(targets, lambda target: _meet(own_host, target, token, clock))
    doors: dict[str, Listener] = {}
    try:
        peers = _named_apart(own_host, peers)
        for peer in peers:
            found(peer.way)
        _open_own_doors(own_host, peers, token, doors)
        second = _second_round(own_host, peers, token, doors)
        for way in second:
            found(way)
    finally:
        for peer in peers:
            if peer.conversation is not None:
                peer.conversation.close()
        for door in doors.values():
            door.close()
    return Examination(
        hosts=tuple(peer.facts for peer in peers if peer.facts is not None),
        ways=(*(peer.way for peer in peers), *second),
        clocks=tuple(peer.clock for peer in peers if peer.clock is not None),
    )


def _meet(own_host: str, target: Target, token: str, clock: Callable[[], float]) -> _Peer:
    way, conversation = call(own_host, target, token)
    peer = _Peer(target=target, way=way, conversation=conversation)
    if conversation is None:
        return peer
    try:
        peer.facts = conversation.ask(AskFacts(), Facts, timeout_s=_ASK_TIMEOUT_S).facts
        peer.clock = _clock_offset(peer.facts.host, conversation, clock)
    except (OSError, FrameError) as error:
        conversation.close()
        peer.conversation = None
        peer.way = msgspec.structs.replace(way, ok=False, stage="answer", error=str(error))
        return peer
    try:
        peer.door = conversation.ask(AskDoor(), Door, timeout_s=_ASK_TIMEOUT_S)
    except (OSError, FrameError):
        pass  # the others then call its doctor's port
    return peer


def _clock_offset(host: str, conversation: Conversation, clock: Callable[[], float]) -> ClockOffset:
    """As NTP (RFC 5905, section 8): the quickest round trip says most, and half of it is the uncertainty."""
    readings = []
    for _ in range(_NUM_CLOCK_READINGS):
        before_s, begin_s = clock(), time.perf_counter()
        there_s = conversation.ask(AskClock(), Clock, timeout_s=_ASK_TIMEOUT_S).time_s
        half_s = (time.perf_counter() - begin_s) / 2
        readings.append((half_s, there_s - (before_s + half_s)))
    uncertainty_s, offset_s = min(readings)
    return ClockOffset(host=host, offset_s=offset_s, uncertainty_s=uncertainty_s)


def _named_apart(own_host: str, peers: Sequence[_Peer]) -> list[_Peer]:
    """Give hosts that call themselves alike the address that was typed as well."""
    names = [own_host, *(peer.name for peer in peers)]
    for peer in peers:
        name = peer.name
        if peer.facts is not None and names.count(name) > 1:
            name = f"{name} ({peer.target.name})"
            peer.facts = msgspec.structs.replace(peer.facts, host=name)
        peer.way = msgspec.structs.replace(peer.way, target=name)
        if peer.clock is not None:
            peer.clock = msgspec.structs.replace(peer.clock, host=name)
    return list(peers)


def _open_own_doors(own_host: str, peers: Sequence[_Peer], token: str, doors: dict[str, Listener]) -> None:
    for peer in peers:
        if peer.conversation is not None and peer.conversation.own_address not in doors:
            try:
                doors[peer.conversation.own_address] = open_door(
                    peer.conversation.own_address, token=token, host=own_host
                )
            except OSError:
                pass  # a link-local address without its zone; that peer is then not asked to call back


def _second_round(own_host: str, peers: Sequence[_Peer], token: str, doors: dict[str, Listener]) -> list[Way]:
    """Every host that can be asked calls every other host."""

    def calls_of(caller: _Peer | None) -> list[Way]:
        others = [_where(peer) for peer in peers if peer is not caller and (caller is not None or peer.door)]
        if caller is None:
            return list(call_all(own_host, tuple(others), token))
        conversation = caller.conversation
        assert conversation is not None, "only those with a conversation are asked"
        own_door = doors.get(conversation.own_address)
        if own_door is not None:
            others.insert(0, Target(own_host, conversation.own_address, own_door.port, False))
        some = tuple(others)
        try:
            ways = conversation.ask(AskCalls(some), Called, timeout_s=CALL_TIMEOUT_S + 1).ways
        except (OSError, FrameError) as error:
            ways = tuple(_not_reported(caller.name, target, error) for target in some)
        # It knows itself and the others by other names.
        return [msgspec.structs.replace(way, source=caller.name, target=target.name) for way, target in zip(ways, some)]

    callers = [None, *(peer for peer in peers if peer.conversation is not None)]
    return [way for ways in each(callers, calls_of) for way in ways]


def _not_reported(source: str, target: Target, error: Exception) -> Way:
    return Way(
        source=source,
        target=target.name,
        address=target.address,
        port=target.port,
        control=target.control,
        ok=False,
        stage="report",
        error=str(error),
    )


def _where(peer: _Peer) -> Target:
    if peer.door is not None:
        return Target(peer.name, peer.door.address, peer.door.port, False)
    return Target(peer.name, peer.target.address, peer.target.port, True)


def _typed(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
