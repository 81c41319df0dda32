"""Who is left out, who does the work: arithmetic that every rank must do alike."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.control.absence import (
    REMEMBERED,
    Passed,
    late_s,
    runs_of,
    share_out,
    stalled,
    units_of,
    units_without,
    usual_s,
)
from ragtag.control.sharing import initial_plan, units_per_rank


@st.composite
def plans(draw):
    """A plan with pinned shares, some of them 0, and a unit."""
    shares = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any))
    unit = draw(st.integers(1, min(4, sum(shares))))
    return initial_plan(world_size=len(shares), global_batch_size=sum(shares), unit=unit, shares=shares)


def ranks(plan):
    return st.sets(st.integers(0, len(plan.shares) - 1))


@given(st.data())
def test_what_absent_ranks_had_is_shared_out(data):
    plan = data.draw(plans())
    absent = data.draw(ranks(plan))
    samples = data.draw(st.integers(1, sum(plan.shares)))
    units = units_without(plan, samples, absent)
    assert sum(units) == -(-samples // plan.unit)
    present = set(range(len(plan.shares))) - absent
    if not absent or not present:
        assert units == units_per_rank(plan, samples)
        return
    assert all(units[rank] == 0 for rank in absent)
    if any(plan.shares[rank] for rank in present):
        assert all(units[rank] == 0 for rank in present if not plan.shares[rank]), "a parked rank stays parked"
    else:
        working = [units[rank] for rank in present]
        assert max(working) - min(working) <= 1


@given(st.data())
def test_lost_units_are_given_out_once_and_to_those_present(data):
    plan = data.draw(plans())
    absent = data.draw(ranks(plan))
    lost = sorted(data.draw(st.sets(st.integers(0, 60))))
    given_out = share_out(lost, plan, absent)
    assert [unit for units in given_out for unit in units] == lost, "each once, in order, so that runs stay whole"
    if len(absent) < len(plan.shares):
        assert not any(given_out[rank] for rank in absent)
    else:
        counts = list(map(len, given_out))
        assert max(counts) - min(counts) <= 1


@given(st.sets(st.integers(0, 200)))
def test_runs_say_what_units_say(units):
    runs = runs_of(sorted(units))
    assert units_of(runs) == tuple(sorted(units))
    assert all(later[0] > earlier[1] + 1 for earlier, later in itertools.pairwise(runs)), "runs that touch are one"


seconds = st.floats(0, 1e4)


@given(since=seconds, micro_batch=seconds, step=seconds, usual=seconds, more=seconds)
def test_a_stalled_rank_stays_stalled(since, micro_batch, step, usual, more):
    def at(later):
        return stalled(since_step_s=since + later, since_micro_batch_s=micro_batch + later, step_s=step, usual_s=usual)

    assert at(more) or not at(0.0)
    if at(0.0):
        assert since > late_s(step) > 0
        assert micro_batch > max(2 * usual, usual + 0.1)


def test_nothing_is_late_before_anything_is_known():
    assert not stalled(since_step_s=1e9, since_micro_batch_s=1e9, step_s=0.0, usual_s=1.0)
    assert not stalled(since_step_s=1e9, since_micro_batch_s=1e9, step_s=1.0, usual_s=usual_s((), 8))


passed = st.builds(Passed, samples=st.integers(1, 64), seconds=st.floats(1e-4, 1e3))


@given(st.lists(passed, min_size=1, max_size=REMEMBERED), st.integers(1, 64), st.floats(0, 100))
def test_nine_of_ten_keep_to_what_is_usual(history, samples, fixed):
    usual = usual_s(history, samples, fixed=fixed)
    slower = [each for each in history if each.seconds * (samples + fixed) / (each.samples + fixed) > usual]
    assert len(slower) <= len(history) // 10
    assert usual <= usual_s(history, 2 * samples, fixed=fixed) <= 2 * usual * (1 + 1e-9)
    assert usual_s(history, 2 * samples) == pytest.approx(2 * usual_s(history, samples))


@pytest.mark.parametrize(("times", "usual"), [([1.0] * 31 + [50.0], 1.0), ([1.0] * 30 + [50.0] * 2, 50.0)])
def test_one_stall_is_a_stall_and_two_in_a_row_are_a_slow_rank(times, usual):
    assert usual_s([Passed(8, seconds) for seconds in times], 8) == usual


@pytest.mark.parametrize(("forward", "reading"), [(0.35, 0.0), (1.0, 0.0), (0.5, 1.0)])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_healthy_rank_with_30_percent_jitter_is_left_out_less_than_once_in_500_steps(forward, reading, micro_batches):
    generator = random.Random(7)
    steps, alarms, history, walls = 3000, 0, [], []

    def jitter():
        return math.exp(generator.gauss(0, 0.3)) / micro_batches

    for _ in range(steps):
        ends = []
        for rank in range(3):
            now = 0.0
            for _ in range(micro_batches):
                read, compute = reading * jitter(), jitter()
                to_backward = read + forward * compute
                if rank == 0:
                    alarms += len(walls) >= 4 and stalled(
                        since_step_s=now + to_backward,
                        since_micro_batch_s=to_backward,
                        step_s=sorted(walls[-16:])[len(walls[-16:]) // 2],
                        usual_s=usual_s(history[-REMEMBERED:], 8),
                    )
                    history.append(Passed(8, to_backward))
                now += read + compute
            ends.append(now)
        walls.append(max(ends))
    assert alarms < steps / 500
