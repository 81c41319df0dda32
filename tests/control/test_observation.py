import pytest

from ragtag.control.ballot import Ballot
from ragtag.control.observation import forwards, observe_ballots
from ragtag.control.sharing import initial_plan, next_plan
from ragtag.core.errors import SettingError


def ballot(plan, samples, *, compute_s, exposed_s, data_s=0.0, apply_s=0.0):
    return Ballot(
        step=3, plan_hash=int(plan.id, 16), contents_hash=0, samples=samples, weight=1.0, loss_total=1.0, norm=1.0,
        compute_s=compute_s, exposed_s=exposed_s, data_s=data_s, apply_s=apply_s,
    )  # fmt: skip


def test_what_the_ballots_say():
    plan = initial_plan(world_size=3, global_batch_size=12, unit=1, micro_batch=3, shares=(7, 5, 0))
    seen = observe_ballots(
        [
            ballot(plan, 7, compute_s=0.2, exposed_s=0.05, apply_s=0.01),
            ballot(plan, 5, compute_s=0.1, exposed_s=0.15, data_s=0.02),
            ballot(plan, 0, compute_s=0.0, exposed_s=0.25),
        ],
        plan,
    )
    assert (seen.step, seen.plan_id) == (3, plan.id)
    assert seen.samples == (7, 5, 0)
    assert seen.micro_batches == (3, 2, 0)
    assert seen.compute_s == (0.2, 0.1, 0.0)
    assert seen.comm_s == 0.05
    assert seen.wall_s == pytest.approx(0.27)


def test_units_are_forwards_of_their_own():
    assert forwards(20, unit=8, micro_batch=16) == 3
    assert forwards(20, unit=1, micro_batch=16) == 2
    assert forwards(0, unit=1, micro_batch=1) == 0


def test_the_first_plan_keeps_to_caps():
    plan = initial_plan(world_size=3, global_batch_size=64, unit=8, caps=(10, None, 100))
    assert plan.shares == (8, 32, 24)
    with pytest.raises(SettingError, match="do not fit"):
        initial_plan(world_size=2, global_batch_size=64, unit=8, caps=(10, 50))


def test_the_next_plan_is_of_the_same_batch():
    plan = initial_plan(world_size=3, global_batch_size=20, unit=8)
    after = next_plan(plan, (0, 2, 1), reason="because")
    assert (after.shares, after.micro_batch, after.epoch, after.reason) == ((0, 16, 4), (8, 8, 8), 1, "because")
