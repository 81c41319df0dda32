"""What the ring costs a rank: arithmetic on one step's numbers, and real steps that measure it and switch chunks."""

import msgspec
import pytest
from tests.ranks import run_ranks
from tests.runtime import cases
from tests.runtime.reference import plain_run, worst_difference

import ragtag
from ragtag.comm.ring import RingTime
from ragtag.control.chunks import ROWS, RingStep
from ragtag.runtime.ring_cost import RingCost


def cost_of(effort, *, weights=(1, 1, 1), rank=0, waited_s=1.0, cpu_s=0.0, steps=1):
    cost = RingCost()
    for _ in range(steps):
        cost.observe([effort], weights, rank, waited_s=waited_s, cpu_s=cpu_s)
    return cost


@pytest.mark.parametrize("steps", [1, 30])
def test_processor_time_by_what_it_was_spent_on(steps):
    # Of three equal chunks a rank adds 2/3 of a gradient, and sends and receives 4/3 each.
    cost = cost_of(RingTime(add_cpu_s=0.02, cpu_s=0.05, busy_s=0.05), cpu_s=0.1, steps=steps)
    assert cost.add_s == pytest.approx(0.03)
    assert cost.send_s == pytest.approx(0.03)


def test_a_second_of_a_throttled_processor_is_longer():
    cost = cost_of(RingTime(add_cpu_s=0.02, cpu_s=0.05, busy_s=0.25), cpu_s=0.1)
    assert cost.add_s == pytest.approx(5 * 0.03)
    assert cost.send_s == pytest.approx(5 * 0.03)


def test_other_chunks_of_the_same_ring_tell_the_same_costs():
    cost = cost_of(RingTime(add_cpu_s=0.01, cpu_s=0.02, busy_s=0.02), weights=(2, 1, 1), rank=0, cpu_s=0.01 + 0.025)
    assert cost.add_s == pytest.approx(0.01 / 0.75)
    assert cost.send_s == pytest.approx(0.01)


def test_what_was_hidden_behind_backward_costs_nothing():
    cost = cost_of(RingTime(add_cpu_s=0.02, cpu_s=0.05, busy_s=0.05), waited_s=0.0, cpu_s=0.0)
    assert cost.add_s == cost.send_s == 0.0


def test_a_rank_was_not_busier_than_it_waited():
    cost = cost_of(RingTime(add_cpu_s=0.01, cpu_s=0.01, busy_s=10.0), waited_s=0.2, cpu_s=0.1)
    assert cost.add_s * 2 / 3 <= 0.2 + 1e-12
    assert cost.send_s == 0.0


def switch_chunks():
    model = cases.mlp()
    config = ragtag.Config(bucket_bytes=1024, check_replicas_every=1)
    trainer = ragtag.Trainer(
        model, cases.adam(model), cases.mean_squares, cases.regression(60), global_batch_size=12, config=config
    )
    run, used = trainer._run, []
    all_reduce = run.group.all_reduce

    def spy(flat, *, weights=None, **settings):
        used.append(tuple(weights))
        return all_reduce(flat, weights=weights, **settings)

    run.group.all_reduce = spy
    controller = run.controller
    for weights in [(1, 1, 1), (1, 2, 33), (30, 1, 5)]:
        plan = msgspec.structs.replace(controller.plan, chunk_weights=weights)
        controller._state = msgspec.structs.replace(controller._state, plan=plan)
        run.plan = plan
        list(trainer.steps(3))
    trainer.close()
    return cases.values(model), used, controller._state.ring


def test_the_plans_chunks_are_the_rings_and_the_gradient_stays_that_of_one_process():
    model = cases.mlp()
    plain_run(model, cases.adam(model), cases.sum_squares, cases.regression(60), steps=9, batch=12)
    for values, used, ring in run_ranks(3, switch_chunks):
        assert worst_difference(values, cases.values(model)) < 1e-10
        assert list(dict.fromkeys(used)) == [(1, 1, 1), (1, 2, 33), (30, 1, 5)]
        assert 0 < len(ring) <= ROWS
        assert all(isinstance(step, RingStep) and min(step.send_s) > 0 for step in ring)
