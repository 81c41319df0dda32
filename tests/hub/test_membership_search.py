"""The rules hold in every interleaving of small worlds, and the search finds out when one of them is weakened."""

import pytest
from msgspec.structs import replace
from tests.hub.membership_model import Model
from tests.hub.membership_search import search
from tests.hub.membership_values import Bounds, Weak

from ragtag.hub import rules, rules_decision, rules_forming, rules_frames, worker_rules
from ragtag.hub.frames import Checkpointed, Go, Join
from ragtag.hub.rules_state import HubState, PointerRecord, Preparing
from ragtag.hub.rules_turn import Turn
from ragtag.hub.worker_rules import Instruction, WorkerState

QUICK = [
    Bounds(2, crash=2),
    Bounds(2, crash=1, glitch=1, steps=1),
    Bounds(2, crash=1, suspect=1, steps=1),
    Bounds(2, suspect=1, rejoin=1, steps=1),
    Bounds(2, suspect=1, checkpoint=2, steps=1),
    Bounds(2, cut=1, steps=1),
    Bounds(2, hub=1),
    Bounds(2, crash=1, hub=1, steps=1),
    Bounds(1, newcomers=1, crash=1, steps=1),
    Bounds(1, newcomers=1, suspect=1, glitch=1, steps=1),
    Bounds(2, crash=1, cold=True, steps=1),
    Bounds(2, hub=1, cold=True, steps=1),
    Bounds(3, crash=1, steps=1),
]
WIDE = [
    Bounds(2, crash=2, suspect=1),
    Bounds(2, crash=1, suspect=1, glitch=1),
    Bounds(2, suspect=2, glitch=1),
    Bounds(2, crash=1, suspect=1, hub=1),
    Bounds(2, suspect=1, hub=1, steps=1),
    Bounds(2, cut=1, crash=1),
    Bounds(2, cut=1, suspect=1),
    Bounds(2, cut=2, steps=1),
    Bounds(2, suspect=1, rejoin=1, crash=1),
    Bounds(2, suspect=2, checkpoint=2),
    Bounds(2, newcomers=1, crash=1, steps=1),
    Bounds(2, newcomers=1, suspect=1, steps=1),
    Bounds(2, newcomers=1, glitch=1, steps=1),
    Bounds(1, newcomers=1, crash=1, suspect=1, hub=1, steps=1),
    Bounds(1, newcomers=1, suspect=1, hub=1),
    Bounds(1, newcomers=1, crash=1, suspect=1),
    Bounds(1, newcomers=1, cut=1, crash=1, steps=1),
    Bounds(2, crash=1, suspect=1, cold=True, steps=1),
    Bounds(2, crash=1, cut=1, cold=True, steps=1),
    Bounds(1, newcomers=1, crash=1, suspect=1, cold=True),
    Bounds(3, cut=1, steps=1),
    Bounds(3, crash=2, steps=1),
    Bounds(3, crash=1, suspect=1, steps=1),
    Bounds(3, crash=1, hub=1, steps=1),
]


def named(bounds: Bounds) -> str:
    return " ".join(f"{name}={value}" for name, value in bounds._asdict().items() if value)


@pytest.mark.parametrize("bounds", QUICK, ids=named)
def test_rules_hold(bounds):
    assert_holds(bounds)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bounds", WIDE, ids=named)
def test_rules_hold_in_wider_worlds(bounds):
    assert_holds(bounds)


def assert_holds(bounds: Bounds) -> None:
    result = search(Model(bounds))
    print(f"{result.states} states, {result.moves} moves")
    assert not result.violation, "\n".join((*result.trace, result.violation))
    assert result.complete
    # A fault that never happens proves nothing.
    wanted = {"crash", "silent", "link fails", "cut", "hub dies", "rejoin", "checkpoint", "arrive"}
    budgets = (bounds.crash, bounds.suspect, bounds.glitch, bounds.cut, bounds.hub, bounds.rejoin)
    names = ("crash", "silent", "link fails", "cut", "hub dies", "rejoin")
    expected = {name for name, budget in zip(names, budgets, strict=True) if budget}
    assert expected <= result.seen & wanted
    assert {"commit", "vote", "hold"} <= result.seen


Patch = tuple[object, str, object]


def newcomers_only(turn: Turn, preparing: Preparing) -> None:
    rules_forming._begin(turn, preparing, (), [join.inc for join in preparing.joins], 0, "start")


def voids_always(state: WorkerState, go: Go) -> tuple[WorkerState, Instruction]:
    after, told = ON_GO(state, go)
    return (replace(after, held_digest=""), replace(told, do="go on")) if told.do == "apply" else (after, told)


def voids_never(state: WorkerState, go: Go) -> tuple[WorkerState, Instruction]:
    after, told = ON_GO(state, go)
    return (replace(after, held_digest=state.held_digest) if told.do == "go on" else after), told


def hold_something(veterans: list[Join]) -> bool:
    return all(veteran.held_digest for veteran in veterans)


def always_moves(turn: Turn, frame: Checkpointed) -> None:
    turn.journal(PointerRecord(step=frame.step, name=frame.name))


def same_epoch(state: HubState) -> int:
    return max(state.epoch, 1)


ON_GO = worker_rules.on_go
WEAKENED: dict[str, tuple[str, Bounds, Weak, list[Patch]]] = {
    "redo although all veterans hold, after a crash": (
        "I1",
        Bounds(2, crash=1),
        Weak(),
        [(rules_decision, "all_hold_the_same", lambda veterans: False)],
    ),
    "redo although all veterans hold, with a zombie": (
        "I1",
        Bounds(2, suspect=1),
        Weak(),
        [(rules_decision, "all_hold_the_same", lambda veterans: False)],
    ),
    "held gradient void although somebody applied it": (
        "I1",
        Bounds(2, crash=1),
        Weak(),
        [(worker_rules, "on_go", voids_always)],
    ),
    "old held gradient kept and taken for the new one": (
        "I1",
        Bounds(2, glitch=2),
        Weak(),
        [(worker_rules, "on_go", voids_never), (rules_decision, "all_hold_the_same", hold_something)],
    ),
    "generation of newcomers only": (
        "I3",
        Bounds(1, newcomers=1, suspect=1),
        Weak(),
        [(rules_forming, "_without_veteran", newcomers_only), (rules_forming, "_take_back", lambda turn: [])],
    ),
    "first generation votes before it is written down that it started": (
        "I3",
        Bounds(1, newcomers=1, suspect=1, cold=True),
        Weak(votes_early=True),
        [],
    ),
    "apply without the others' votes": ("I1", Bounds(2, crash=1), Weak(applies_alone=True), []),
    "checkpoint pointer not fenced": (
        "I4",
        Bounds(2, suspect=1, checkpoint=2),
        Weak(),
        [(rules_frames, "_checkpointed", always_moves)],
    ),
}
SLOW_TO_FIND: dict[str, tuple[str, Bounds, Weak, list[Patch]]] = {
    "GO sent before it is journalled": ("I1", Bounds(2, suspect=1, hub=1), Weak(journal_last=True), []),
    "generation's number used again after a restart": (
        "I2",
        Bounds(2, suspect=1, hub=1),
        Weak(),
        [(rules, "next_epoch", same_epoch)],
    ),
    "the first that comes back goes on without those on their way": (
        "I6",
        Bounds(2, cut=2, steps=1),
        Weak(),
        [(rules_forming, "_CHANCE", 0.0)],
    ),
}


@pytest.mark.parametrize("what", WEAKENED)
def test_weakened_rules_are_found_out(what, monkeypatch):
    assert_found_out(*WEAKENED[what], monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", SLOW_TO_FIND)
def test_weakened_rules_are_found_out_in_wider_worlds(what, monkeypatch):
    assert_found_out(*SLOW_TO_FIND[what], monkeypatch)


def assert_found_out(invariant: str, bounds: Bounds, weak: Weak, patches: list[Patch], monkeypatch) -> None:
    for module, name, value in patches:
        monkeypatch.setattr(module, name, value)
    result = search(Model(bounds, weak))
    assert result.violation.startswith(invariant), result.violation or "nothing was found"
    assert result.trace
