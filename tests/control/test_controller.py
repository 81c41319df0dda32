import json
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.simulated import Devices, equal_plan, fixed, foreseen, plan_of, run

from ragtag.control.chunks import ring_work_s
from ragtag.control.controller import Controller
from ragtag.control.predict import cluster_of, observe_step
from ragtag.control.proposal import Limits, best_plan, least_step_s
from ragtag.control.sharing import units_per_rank
from ragtag.core.decision import Decision
from ragtag.core.errors import SettingError
from ragtag.core.values import from_json, to_json

FOUR = (1, 1, 0.5, 0.25)


def near(shares, expected):
    return all(abs(share - wanted) <= 2 for share, wanted in zip(shares, expected))


# Shares follow speed.


def test_one_and_four_ms_a_sample():
    result = run(Devices(speeds=[10, 2.5]), 50, 40)
    assert all(near(result.shares(step), (40, 10)) for step in range(5, 41))
    assert result.changes == 1


def test_the_slow_one_recovers():
    result = run(Devices(speeds=[10, lambda step: 2.5 if step <= 15 else 10]), 50, 40)
    assert near(result.shares(15), (40, 10))
    assert all(near(result.shares(step), (25, 25)) for step in range(20, 41))


def test_a_cap():
    result = run(Devices(speeds=[10, 2.5]), 50, 40, Limits(caps=(30, None)))
    assert result.shares(5) == result.shares(40) == (30, 20)


def test_whole_samples_matter():
    assert run(Devices(speeds=[1, 1, 0.1]), 42, 20).shares(5) == (20, 20, 2)


@pytest.mark.parametrize(("before", "after"), [(1, 0.25), (0.25, 1)])
def test_one_device_changes_its_speed_fourfold(before, after):
    devices = Devices(speeds=[lambda step: before if step < 40 else after, 1, 0.5, 0.25])
    result = run(devices, 44, 60)
    assert all(result.eta(step, step) >= 0.93 for step in range(44, 61))


def test_a_fixed_cost_is_learnt_and_planned_with():
    devices = Devices(speeds=[1, 1, 0.25], fixed_s=[0.02, 0.02, 0.08], apply_s=[0.01, 0.01, 0.04])
    result = run(devices, 72, 20)
    assert result.shares(6) == result.shares(20) == devices.best_shares(1, 72)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 20])
def test_one_odd_step_moves_nothing(step):
    result = run(Devices(speeds=[1, 1], jitter=0.02, odd={(step, 0): 10.0}), 40, 60)
    assert result.changes == 0


# Drift.


def test_a_speed_that_slides():
    result = run(Devices(speeds=[lambda step: 1 - 0.4 * min(max(step - 20, 0), 50) / 50, *FOUR[1:]]), 44, 70)
    assert result.eta(21, 70) >= 0.94
    assert result.changes <= 8


def test_a_device_that_somebody_uses_for_20_steps():
    result = run(Devices(speeds=[lambda step: 0.5 if 40 <= step < 60 else 1, *FOUR[1:]]), 44, 80)
    assert result.eta(40, 59) >= 0.92
    assert result.eta(35, 65) >= 0.92
    assert result.changes == 3


def test_a_device_that_flips():
    devices = Devices(speeds=[lambda step: 0.5 if step // 5 % 2 else 1, *FOUR[1:]])
    result = run(devices, 44, 200)
    assert result.eta(6) >= 0.86
    assert result.changes <= 5
    doing_nothing = sum(seen.wall_s for seen in fixed(devices, plan_of((16, 16, 8, 4)), 200)[5:])
    assert result.total_s(6) < 0.9 * doing_nothing


# Noise.


@pytest.mark.parametrize(("speeds", "batch"), [(FOUR, 44), ((1, 1, 1), 42)])
def test_noise_makes_few_changes_and_costs_little(speeds, batch):
    lost, changes = [], []
    for seed in range(3):
        devices = Devices(speeds=speeds, jitter=0.3, seed=seed)
        result = run(devices, batch, 200)
        lost.append(result.total_s(11) / sum(seen.wall_s for seen in foreseen(devices, batch, 200)[10:]) - 1)
        changes.append(result.changes)
    assert sum(lost) / len(lost) < 0.04
    assert max(changes) <= 14


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.floats(0, 0.3), st.integers(2, 5))
def test_stationary_noise_changes_a_bounded_number_of_plans(seed, jitter, ranks):
    speeds = [random.Random(f"{seed} {rank}").choice([1, 0.5, 0.25]) for rank in range(ranks)]
    assert run(Devices(speeds=speeds, jitter=jitter, seed=seed), 32, 120).changes <= 20


# Parking.


def test_a_device_whose_fixed_cost_is_longer_than_a_step_is_parked():
    devices = Devices(speeds=[1, 1, 1], fixed_s=[0, 0, 0.5])
    result = run(devices, 12, 400)
    first, *later = result.controller.history
    assert result.shares(10) == (6, 6, 0)
    assert first.kind == "park"
    assert "rank 2 parked" in first.reason
    assert first.predicted_gain > 0.8
    assert [decision.kind for decision in later] == ["try", "park"] * (len(later) // 2)
    assert all(after.step == before.step + 1 for before, after in zip(later[::2], later[1::2]))
    assert later
    without = 400 * 0.06
    assert result.total_s(10) < 1.1 * without


def test_a_device_that_is_slow_but_worth_it_is_not_parked():
    devices = Devices(speeds=[1, 1, 0.1], fixed_s=[0, 0, 0.002])
    result = run(devices, 42, 300)
    assert {decision.kind for decision in result.controller.history} == {"shares"}
    without = fixed(devices, plan_of((21, 21, 0)), 300)
    assert result.total_s(10) < 0.97 * sum(seen.wall_s for seen in without[9:])


def test_a_parked_device_that_became_fast_works_again():
    result = run(Devices(speeds=[1, 1, lambda step: 0.05 if step < 60 else 1]), 12, 300)
    assert [decision.kind for decision in result.controller.history] == ["park", "try", "unpark"]
    assert result.shares(300) == (4, 4, 4)


def test_what_a_device_did_before_it_was_parked_does_not_count_in_a_try():
    def speed(step):
        return (0.5 if step // 5 % 2 else 1) if step < 40 else 0.02 if step < 70 else 1

    result = run(Devices(speeds=[1, 1, speed]), 24, 500)
    assert result.shares(60) == (12, 12, 0)
    assert result.shares(500) == (8, 8, 8)


def test_a_parked_device_works_again_when_the_others_slow_down():
    speeds = [lambda step: 1 if step < 30 else 0.05] * 2
    result = run(Devices(speeds=[*speeds, 0.05]), 12, 60)
    assert result.shares(20) == (6, 6, 0)
    assert result.shares(60) == (4, 4, 4)
    assert result.controller.history[-1].kind == "unpark"


def test_a_device_that_slows_everybody_down_is_parked_where_that_is_known():
    devices = Devices(speeds=[1, 1, 0.1], presence_s=[0, 0, 0.05])
    assert run(devices, 42, 20, presence_s=[0, 0, 0.05]).shares(20) == (21, 21, 0)
    devices = Devices(speeds=[1, 1, 0.1], presence_s=[0, 0, 0.001])
    assert run(devices, 42, 20, presence_s=[0, 0, 0.001]).shares(20) == (20, 20, 2)


def test_ranks_that_never_had_a_share_are_measured():
    result = run(Devices(speeds=[0.2, 0.2, 1, 1]), 2, 100)
    assert result.shares(50) == (0, 0, 1, 1)


def test_a_try_keeps_what_is_known_about_the_noise_of_a_rank():
    devices = Devices(speeds=[1, 1, lambda step: 0.05 if step < 60 else 1], jitter=0.05)
    controller, tried = Controller(equal_plan(3, 12)), None
    for step in range(1, 300):
        before = controller.speeds[2]
        decision = controller.observe(devices.step(step, controller.plan))
        if decision and decision.kind == "try":
            tried = decision
            assert controller.speeds[2].noise == before.noise
            assert not controller.speeds[2].steps
    assert tried is not None


def test_one_odd_optimizer_step_does_not_count():
    cluster, plan = cluster_of(2), plan_of((4, 4))
    seen = Devices(speeds=[1, 1], apply_s=[0.02, 0.03]).step(1, plan)
    odd = Devices(speeds=[1, 1], apply_s=[2.0, 0.03]).step(2, plan)
    for step in (seen, seen, odd, seen):
        cluster = observe_step(cluster, step)
    assert cluster.apply_s == (0.02, 0.03)


# Decisions.


def test_a_change_must_pay_for_the_switch_in_the_steps_that_remain():
    devices, cost = Devices(speeds=[1, 1, 0.5]), 2.0
    assert run(devices, 40, 8, Limits(switch_cost_s=cost)).changes == 1
    assert run(devices, 40, 8, Limits(switch_cost_s=cost, last_step=8)).changes == 0


def test_what_was_predicted_and_what_was_achieved():
    result = run(Devices(speeds=FOUR, comm_s=0.02, apply_s=[0.01, 0.01, 0.02, 0.04], jitter=0.05), 44, 30)
    for decision in result.controller.history:
        assert decision.achieved_over == 8
        assert decision.achieved_step_s == pytest.approx(decision.predicted_step_s, rel=0.1)
        assert from_json(Decision, to_json(decision)) == decision
    first = result.controller.history[0]
    assert first.reason.startswith("shares 11, 11, 11, 11 -> ")
    assert first.plan.reason == first.reason
    assert "achieved" in first.outcome()


def test_predictions_know_that_the_slowest_of_noisy_ranks_sets_the_pace():
    ratios = []
    for seed in range(4):
        result = run(Devices(speeds=FOUR, jitter=0.3, seed=seed), 44, 150)
        ratios += [
            decision.achieved_step_s / decision.predicted_step_s
            for decision in result.controller.history
            if decision.step > 10 and decision.achieved_step_s and decision.achieved_over == 8
        ]
    assert len(ratios) >= 4
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.15)


@given(st.lists(st.tuples(st.floats(0.05, 1), st.floats(0, 0.3)), min_size=2, max_size=6), st.integers(1, 64))
def test_the_bound_that_spares_the_search_is_a_bound_and_a_near_one(ranks, batch):
    devices = Devices(speeds=[speed for speed, _ in ranks], fixed_s=[cost for _, cost in ranks])
    plan, cluster = plan_of((8,) * len(ranks)), cluster_of(len(ranks))
    for step in range(4):
        cluster = observe_step(cluster, devices.step(step, plan))
    plan = equal_plan(len(ranks), batch)
    best = best_plan(cluster, plan, Limits())
    best_s = max(cluster.rank_s(rank, share, max(1, share), 1) for rank, share in enumerate(best.shares))
    bound_s = least_step_s(cluster, plan, Limits())
    assert bound_s <= best_s + 2e-6
    assert best_s <= bound_s + max(speed.level_s for speed in cluster.speeds)


def test_limits_that_cannot_be_kept():
    with pytest.raises(SettingError, match="do not fit"):
        Controller(equal_plan(2, 50), Limits(caps=(20, 20)))
    with pytest.raises(SettingError, match="caps"):
        Controller(equal_plan(2, 50), Limits(caps=(20,)))
    controller = Controller(equal_plan(2, 50), Limits(caps=(20, 40)))
    decision = controller.observe(Devices(speeds=[1, 1]).step(1, controller.plan))
    assert decision is not None
    assert decision.plan.shares == (20, 30)


def test_a_state_of_something_else_is_refused():
    with pytest.raises(SettingError, match="of 3 ranks"):
        Controller(equal_plan(2, 8)).load_state_dict(Controller(equal_plan(3, 8)).state_dict())
    with pytest.raises(SettingError, match="version"):
        Controller(equal_plan(2, 8)).load_state_dict({})


# Properties of any run.


@st.composite
def scripts(draw):
    """Speeds that change now and then, with noise, odd steps, fixed costs and idle steps thrown in."""
    ranks = draw(st.integers(1, 8))
    table = draw(st.lists(st.lists(st.floats(0.05, 1), min_size=ranks, max_size=ranks), min_size=1, max_size=4))
    unit = draw(st.sampled_from([1, 1, 3, 8]))
    batch = draw(st.integers(max(unit, 2), 64))
    devices = Devices(
        speeds=[lambda step, rank=rank: table[min(step // 12, len(table) - 1)][rank] for rank in range(ranks)],
        fixed_s=draw(st.just(()) | st.lists(st.floats(0, 0.5), min_size=ranks, max_size=ranks)),
        jitter=draw(st.sampled_from([0, 0.02, 0.3])),
        seed=draw(st.integers(0, 99)),
        odd=draw(
            st.dictionaries(st.tuples(st.integers(1, 40), st.integers(0, ranks - 1)), st.floats(0, 20), max_size=4)
        ),
    )
    return devices, batch, unit


@settings(max_examples=40)
@given(scripts(), st.data())
def test_copies_agree_and_every_plan_is_whole(script, data):
    devices, batch, unit = script
    ranks = len(devices.speeds)
    fair = -(-batch // unit) * unit // ranks + unit
    caps = data.draw(st.none() | st.lists(st.none() | st.integers(fair, 2 * fair), min_size=ranks, max_size=ranks))
    micro_batch = data.draw(st.none() | st.integers(unit, 8 * unit))
    limits = Limits(caps=None if caps is None else tuple(caps), micro_batch=micro_batch)
    saved_at = data.draw(st.integers(1, 40))
    plan = equal_plan(ranks, batch, unit=unit, micro_batch=micro_batch)
    one, two = Controller(plan, limits), Controller(plan, limits)
    for step in range(1, 41):
        seen = devices.step(step, one.plan)
        decision = one.observe(seen)
        assert decision == two.observe(msgspec.json.decode(msgspec.json.encode(seen), type=type(seen)))
        assert one.plan == two.plan
        shares = one.plan.shares
        assert sum(shares) == batch
        assert min(shares) >= 0
        assert sum(units_per_rank(one.plan, batch)) == -(-batch // unit)
        assert all(share % unit == 0 for share in shares[: max(r for r in range(ranks) if shares[r])])
        if decision:
            assert decision.plan == one.plan
            assert decision.reason
            assert all(cap is None or share <= cap for cap, share in zip(caps or (), shares))
        if step == saved_at:
            text = json.dumps(two.state_dict())
            two = Controller(plan, limits)
            two.load_state_dict(json.loads(text))
    assert one.state_dict() == two.state_dict()


@st.composite
def changing_speeds(draw):
    ranks = draw(st.integers(2, 5))
    speed = st.floats(0.25, 1)
    table = draw(st.lists(st.lists(speed, min_size=ranks, max_size=ranks), min_size=1, max_size=3))
    # Enough samples that nobody is parked: while a rank is, nobody sees how fast it is, which can cost anything.
    return table, draw(st.integers(5 * ranks, 64)), draw(st.sampled_from([0, 0.01, 0.05])), draw(st.integers(0, 99))


@settings(max_examples=60)
@given(changing_speeds())
def test_never_much_worse_than_equal_shares(script):
    table, batch, jitter, seed = script
    speeds = [lambda step, rank=rank: table[min(step // 20, len(table) - 1)][rank] for rank in range(len(table[0]))]
    devices = Devices(speeds=speeds, jitter=jitter, seed=seed)
    steps = 20 * len(table)
    result = run(devices, batch, steps)
    equal_s = sum(seen.wall_s for seen in fixed(devices, equal_plan(len(speeds), batch), steps)[5:])
    assert result.total_s(6) <= 1.02 * equal_s


# Chunks of the gradient.


def with_ring(devices, controller, steps, *, send_s, comm_s, first=1):
    """Steps in which the last rank's processor is what the ring waits for."""
    for step in range(first, first + steps):
        seen = devices.step(step, controller.plan)
        ring_s = ring_work_s(controller.plan.chunk_weights, [s / 10 for s in send_s], send_s)
        ends = [a + c + r for a, c, r in zip(seen.apply_s, seen.compute_s, ring_s)]
        seen = msgspec.structs.replace(
            seen,
            add_s=tuple(s / 10 for s in send_s),
            send_s=send_s,
            comm_s=comm_s,
            wall_s=max(ends),
        )
        controller.observe(seen)
    return first + steps


def test_a_parked_rank_whose_ring_everybody_waits_for_owns_most_of_the_gradient():
    devices = Devices(speeds=[1, 1, 0.01], apply_s=[0.01, 0.01, 0.1])
    controller = Controller(plan_of((10, 10, 0)))
    with_ring(devices, controller, 40, send_s=(0.01, 0.01, 0.1), comm_s=0.2)
    (decision,) = [decision for decision in controller.history if decision.kind == "chunks"]
    assert decision.step == 24, "16 steps after a try of it, at a multiple of 8"
    weights = decision.plan.chunk_weights
    assert weights[2] > 10 * max(weights[:2])
    assert decision.plan.shares == (10, 10, 0)
    assert decision.reason.startswith("rank 2 owns 33 % -> 9")
    assert decision.predicted_gain > 0.05
    assert decision.achieved_step_s is not None
    assert decision.achieved_step_s <= decision.predicted_step_s, "only a part of what this model saves is promised"
    assert controller.plan.chunk_weights == weights


def test_chunks_go_back_when_the_rank_is_as_fast_as_the_others():
    devices = Devices(speeds=[1, 1, 0.01], apply_s=[0.01, 0.01, 0.1])
    controller = Controller(plan_of((10, 10, 0)))
    after = with_ring(devices, controller, 26, send_s=(0.01, 0.01, 0.1), comm_s=0.2)
    assert controller.plan.chunk_weights[2] > 20
    quick = Devices(speeds=[1, 1, 1], apply_s=[0.01, 0.01, 0.01])
    with_ring(quick, controller, 80, send_s=(0.01, 0.01, 0.01), comm_s=0.3, first=after)
    assert max(controller.plan.chunk_weights) < 2 * min(controller.plan.chunk_weights)


def test_a_rank_with_samples_to_give_away_gives_samples():
    devices = Devices(speeds=[1, 1, 0.5], apply_s=[0.01, 0.01, 0.1])
    controller = Controller(plan_of((40, 40, 16)))
    with_ring(devices, controller, 60, send_s=(0.01, 0.01, 0.1), comm_s=0.27)
    assert controller.plan.shares[2] > 1
    assert controller.plan.chunk_weights == (1, 1, 1)


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_equal_ranks_keep_equal_chunks(jitter):
    devices = Devices(speeds=[1, 1, 1, 1], jitter=jitter, apply_s=[0.01] * 4)
    controller = Controller(plan_of((5, 5, 5, 5)))
    with_ring(devices, controller, 100, send_s=(0.004,) * 4, comm_s=0.02)
    assert all(decision.kind != "chunks" for decision in controller.history)


def test_every_step_is_predicted_before_it_runs():
    devices = Devices(speeds=[1, 1, 0.5, 0.25], comm_s=0.02, apply_s=[0.01] * 4)
    controller = Controller(equal_plan(4, 44))
    predicted = []
    for step in range(1, 41):
        predicted.append(controller.predicted_step_s)
        seen = devices.step(step, controller.plan)
        controller.observe(seen)
        if step > 10:
            assert predicted[-1] == pytest.approx(seen.wall_s, rel=0.02)
    assert predicted[0] == 0, "nothing is known yet"
