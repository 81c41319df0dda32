"""What ranks bring into a generation and make of it, and what frames of the hub do to a worker: no processes."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.comm.elastic import ElasticGroup
from ragtag.comm.generation import AloneGroup
from ragtag.comm.group import raise_failure
from ragtag.comm.passing import GenerationEnded
from ragtag.comm.standing import Evicted, Standing
from ragtag.comm.transport import TransportError
from ragtag.control.membership import Brought, memory_of, plan_for
from ragtag.hub.frames import Fail, Frame, Go, Join, Member, Prep
from ragtag.runtime import regroup
from ragtag.runtime.script import ScriptPosition

ranks = st.lists(
    st.builds(
        Brought,
        level_s=st.sampled_from([0.0, 0.001, 0.004, 0.1]),
        micro_batch=st.sampled_from([None, None, 0, 1, 3, 50]),
        has_work=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def plan_of(brought: list[Brought], batch: int = 24, unit: int = 1) -> Any:
    return plan_for(brought, global_batch_size=batch, unit=unit, micro_batch=None, reason="a test")


@given(ranks)
def test_a_plan_deals_out_the_batch_and_keeps_to_memory(brought: list[Brought]) -> None:
    plan, memory = plan_of(brought), memory_of(brought)
    assert sum(plan.shares) == 24
    for share, size, most in zip(plan.shares, plan.micro_batch, memory or [None] * len(brought)):
        assert size >= 1
        if most is not None:
            assert share == 0 if most == 0 else size <= most


@given(ranks)
def test_a_rank_with_room_works_before_one_whose_memory_holds_nothing(brought: list[Brought]) -> None:
    able = [each.micro_batch != 0 for each in brought]
    if any(able):
        assert not any(share for share, can in zip(plan_of(brought).shares, able) if not can)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.sampled_from([1, 4]))
def test_pinned_shares_stay_as_they_are_while_the_ranks_do(units: list[int], unit: int) -> None:
    plan = plan_of([Brought(pinned=count, has_work=count > 0) for count in units], sum(units) * unit, unit)
    assert plan.shares == tuple(count * unit for count in units)


def test_pinned_shares_stay_in_proportion_and_a_newcomer_gets_their_mean() -> None:
    assert plan_of([Brought(pinned=12), Brought(pinned=4)]).shares == (18, 6)
    assert plan_of([Brought(pinned=12), Brought(pinned=4), Brought()]).shares == (12, 4, 8)


class Wire:
    """The hub's end: keeps what was sent."""

    lost_for_s = 0.0

    def __init__(self) -> None:
        self.sent: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)

    def close(self) -> None:
        pass


def member(name: str) -> Member:
    return Member(inc=name, name=name, host="here", address="127.0.0.1", store_port=1)


def go(generation: int, names: str = "a", **words: Any) -> Go:
    settings = {"num_veterans": 0, "base": 0, "action": "start", "reason": "", **words}
    return Go(generation=generation, members=tuple(map(member, names)), **settings)


def worker(form: Any = None) -> tuple[ElasticGroup, Wire]:
    wire = Wire()
    form = form or (lambda go, rank, forming: AloneGroup(1.0, "here"))
    group = ElasticGroup(member=member("a"), patience_s=1.0, form=form)
    group.attach(wire)
    return group, wire


def soft_prep(generation: int) -> Prep:
    return Prep(generation=generation, members=("a", "new"), soft=True, reason="new joins")


def test_newcomers_that_were_announced_before_a_generation_was_entered_do_not_end_it() -> None:
    group, wire = worker()
    group.hear(go(1))
    group.hear(soft_prep(2))
    group.regroup(Standing())
    assert group.asked_to_regroup
    assert group.exchange(b"x") == (b"x",)
    assert not [frame for frame in wire.sent if isinstance(frame, Fail)]


def test_a_hard_generation_announced_before_one_was_entered_ends_it_without_blaming_anybody() -> None:
    formed = []

    def form(go: Go, rank: int, forming: Any) -> AloneGroup:
        formed.append(go.generation)
        if forming.broken():
            raise TransportError("nobody answers", peer=None)
        return AloneGroup(1.0, "here")

    group, wire = worker(form)
    group.hear(go(1))
    group.hear(Prep(generation=2, members=("a",), soft=False, reason="b is lost"))
    group.hear(go(2))
    assert group.regroup(Standing()).generation == 2
    assert [frame.generation for frame in wire.sent if isinstance(frame, Join)] == [2]
    assert not [frame for frame in wire.sent if isinstance(frame, Fail)]


def test_own_work_ends_where_the_generation_does() -> None:
    group, _ = worker()
    group.hear(go(1))
    group.regroup(Standing())
    raise_failure(group)
    group.hear(Prep(generation=2, members=("a",), soft=False, reason="b is lost"))
    with pytest.raises(GenerationEnded, match="b is lost"):
        raise_failure(group)


@dataclasses.dataclass
class FakeSettling:
    number: int
    held_digest: str
    outcome: Any = None

    def void(self) -> None:
        self.held_digest = ""


def run_with(group: ElasticGroup, settling: Any = None, **words: Any) -> Any:
    state = {
        "committed": 7,
        "num_applied": 7,
        "applied_digest": "d7",
        "in_hand": settling,
        "late_report": None,
        **words,
    }
    return SimpleNamespace(group=group, **state)


def test_who_holds_a_step_or_has_not_shown_it_to_the_script_takes_no_newcomers() -> None:
    group, _ = worker()
    assert regroup.standing(run_with(group)).in_call == ""
    held = regroup.standing(run_with(group, FakeSettling(8, "d8")))
    assert (held.in_call, held.held_digest) == ("applying", "d8")
    assert regroup.standing(run_with(group, late_report=object())).in_call == "applying"
    settled = regroup.standing(run_with(group, FakeSettling(8, "d8", outcome=object())))
    assert settled.held_digest == "", "what is settled is applied, not held"


def test_what_the_hub_compares_never_goes_back() -> None:
    group, _ = worker()
    assert regroup.standing(run_with(group, committed=2, num_applied=9)).applied == 9


@pytest.mark.parametrize(("base", "num_veterans"), [(9, 1), (7, 0)])
def test_who_cannot_follow_the_others_makes_room_for_a_new_process(base: int, num_veterans: int) -> None:
    group, _ = worker()
    last = go(1, num_veterans=num_veterans, base=base, action="redo")
    group.go, group.is_newcomer = last, num_veterans == 0
    with pytest.raises(Evicted, match="a new process copies the state"):
        regroup.enter(run_with(group), last, {}, Brought())


def test_a_script_that_joins_has_all_before_the_open_call_behind_it() -> None:
    others = ScriptPosition()
    others.record({"value": 1})
    others.claim(5, committed=0)
    others.finish(0, committed=5, complete=True)
    others.record({"value": 2})
    others.claim(5, committed=5)
    mine = ScriptPosition()
    mine.join(others.state_dict(), committed=7)
    assert mine.catching_up
    assert mine.recorded() == {"value": 1}
    assert mine.claim(5, committed=7) == (0, 5)
    mine.finish(0, committed=7, complete=True)
    assert mine.catching_up
    assert mine.recorded() == {"value": 2}
    assert mine.claim(5, committed=7) == (1, 10)
    assert not mine.catching_up


def test_evaluations_are_still_known_after_a_state_was_loaded_by_hand() -> None:
    script = ScriptPosition()
    script.record({"value": 1})
    script.claim(5, committed=0)
    script.finish(0, committed=5, complete=True)
    script.record({"value": 2})
    script.load_state_dict({"calls": [], "evaluations": {"3/0": {"value": 9}}}, committed=0, replay=True)
    assert script.state_dict()["evaluations"] == {"0/0": {"value": 1}, "1/0": {"value": 2}}
