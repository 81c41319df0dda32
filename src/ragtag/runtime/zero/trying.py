"""The trial before step 1 where parameters are cut: one rank tries the model, the others gather blocks as it asks.

The one idea: until a round was written down, only the rank that computes knows which block is needed next; so it says
so, block by block. After that nobody says anything.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from ragtag.comm.group import Group
from ragtag.runtime.zero.rounds import Rounds
from ragtag.runtime.zero.schedule import Noted, schedule_of

_WORD = struct.Struct("<q")
_END = -1


@contextmanager
def leading(rounds: Rounds, group: Group) -> Iterator[None]:
    """In here this rank may run the model as it likes."""

    def lead(number: int) -> None:
        if not rounds.is_present(number):
            group.exchange(_WORD.pack(number), "trying the loss")
            rounds.have(number)

    rounds.lead = lead
    yield
    rounds.abandon()
    group.exchange(_WORD.pack(_END), "trying the loss")


def following(rounds: Rounds, group: Group) -> None:
    """Gather what the rank that tries asks for, until it is done."""
    while True:
        (number,) = _WORD.unpack(group.exchange(_WORD.pack(0), "trying the loss")[0])
        if number == _END:
            return
        rounds.have(number)
        rounds.abandon()


def begin_trial(rounds: Rounds | None) -> None:
    """Begin to note what happens, inside `leading`."""
    if rounds is not None:
        rounds.abandon()
        rounds.noted = []
        rounds.lead(0)


def agree_on_schedule(rounds: Rounds, noted: list[Noted], group: Group, *, gathers: bool) -> None:
    """Take rank 0's round for everybody's; a call of the group."""
    take_schedule(rounds, group.gather("a round", [list(each) for each in noted])[0], gathers=gathers)


def take_schedule(rounds: Rounds, told: list[Any], *, gathers: bool) -> None:
    """Take the round that others have `told` for one's own."""
    rounds.told = told
    events = [msgspec.convert(each, Noted) for each in told]
    rounds.follow(schedule_of(events, rounds.block_of, gathers=gathers))
