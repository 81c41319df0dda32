"""A pool is given up where steps with it were slower, beyond doubt, than steps without it."""

import random
from itertools import pairwise

from ragtag.control.pool_trial import STEPS, PoolTrial


def run(steps, with_s, without_s, *, wanted=lambda step: True, jitter=0.0, seed=0):
    """Step times by whether the step has a pool; returns what each step had, and the last state."""
    draws, trial, pulled = random.Random(seed), PoolTrial(), []
    for step in range(1, steps + 1):
        pulled.append(trial.pulls)
        wall_s = (with_s if trial.pulls else without_s) * draws.lognormvariate(0, jitter)
        trial = trial.observe(step=step, wall_s=wall_s, pulled=pulled[-1], wanted=wanted(step))
    return pulled, trial


def test_what_pays_is_kept():
    pulled, trial = run(100, 0.9, 1.0)
    assert trial.kept
    assert trial.verdict == "pulling work is kept: 0.9 s a step with it, 1 s without"
    assert not any(pulled[1 + STEPS : 1 + 2 * STEPS])
    assert all(pulled[1 + 2 * STEPS :])


def test_what_costs_more_than_it_saves_is_tried_less_and_less():
    pulled, trial = run(2000, 1.1, 1.0)
    assert not trial.kept
    assert "does not pay: 1.1 s a step with it, 1 s without" in trial.verdict
    begins = [step for step in range(1, len(pulled)) if pulled[step] and not pulled[step - 1]]
    waits = [later - earlier for earlier, later in pairwise(begins)]
    assert len(waits) >= 3
    assert all(later > 1.8 * earlier for earlier, later in pairwise(waits))
    assert sum(pulled) == STEPS * len(begins)


def test_noise_seldom_decides():
    kept = sum(run(30, 0.93, 1.0, jitter=0.08, seed=seed)[1].kept for seed in range(200))
    assert kept > 190
    kept = sum(run(30, 1.15, 1.0, jitter=0.08, seed=seed)[1].kept for seed in range(200))
    assert kept < 4


def test_nothing_is_pulled_that_nobody_wants_and_a_new_wish_is_a_new_trial():
    pulled, trial = run(60, 0.9, 1.0, wanted=lambda step: not 40 <= step < 45)
    assert pulled[39]
    assert not any(pulled[40:45])
    assert any(pulled[45:])
    assert not trial.kept


def test_steps_that_ran_before_a_change_took_hold_do_not_count():
    trial = PoolTrial().observe(step=1, wall_s=9.0, pulled=False, wanted=True)
    assert trial.pulls
    assert trial.pulled_s == trial.plain_s == ()
