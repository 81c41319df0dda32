"""A rank that runs out of memory: its work is done again in smaller pieces or by others, and the gradient stays."""

import os
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks, solo
from tests.runtime import cases
from tests.runtime.reference import plain_run, plain_unit_run, worst_difference
from tests.runtime.test_stand_in import FakeSettling, Watched
from tests.runtime.test_units import classify, classify_sum, images, network
from torch.utils.checkpoint import checkpoint

import ragtag
from ragtag.comm.group import SoloGroup
from ragtag.runtime.gradients import GradientSums
from ragtag.runtime.out_of_memory import ran_out_of_memory
from ragtag.runtime.stand_in import StoodIn

STEPS, FAILS_AT = 8, 4
ROOT = Path(__file__).parents[2]


@dataclass
class Fault:
    """From step `step` on, more than `most` samples in one forward are too many for the ranks in `ranks`."""

    phase: str
    most: int
    ranks: tuple[int, ...] = (1,)
    step: int = FAILS_AT
    error: type[Exception] = torch.OutOfMemoryError
    last: int = 10**9
    fitting: int = 0
    """How many fit all the same, before that."""
    tried: list[int] = field(default_factory=list)

    def watch(self, model, number):
        """Fail in the forward of the last layer, or in the backward of the first one when all others have gradients."""
        if int(os.environ.get("RANK", "0")) not in self.ranks:
            return

        def fail(samples):
            if self.step <= number() <= self.last:
                self.tried.append(samples)
                if samples > self.most and len(self.tried) > self.fitting:
                    raise self.error(f"Tried to allocate {samples} MiB")

        def in_forward(module, inputs, output):
            fail(len(output))

        def in_backward(module, inputs, output):
            if output.requires_grad:
                output.register_hook(lambda grad: fail(len(grad)))

        layers = list(model.children())
        if self.phase == "forward":
            layers[-1].register_forward_hook(in_forward)
        else:
            layers[0].register_forward_hook(in_backward)


def train(fault, settings=None, options=None, steps=STEPS):
    model, trainer = cases.mlp(), None
    fault.watch(model, lambda: 0 if trainer is None else trainer._run.committed + 1)
    config = ragtag.Config(**{"check_replicas_every": 1, "bucket_bytes": 1024, **(settings or {})})
    trainer = ragtag.Trainer(
        model,
        cases.adam(model),
        cases.mean_squares,
        cases.regression(61),
        global_batch_size=24,
        config=config,
        **(options or {}),
    )
    reports = list(trainer.steps(steps))
    plan, decisions = trainer.plan, trainer.decisions
    assert trainer._run.replica_sums()._overlap == config.overlap, "a repeated reduction ends the overlap"
    trainer.close()
    return cases.values(model), reports, plan, decisions, fault.tried


def expected(steps=STEPS):
    model = cases.mlp()
    plain_run(model, cases.adam(model), cases.sum_squares, cases.regression(61), steps=steps, batch=24)
    return cases.values(model)


def check_same(results, values, tolerance=1e-12):
    for own, reports, plan, decisions, _ in results:
        assert worst_difference(own, values) < tolerance
        assert plan == results[0][2]
        assert [report.loss for report in reports] == [report.loss for report in results[0][1]]
        assert all(sum(report.shares) == report.samples for report in reports)
        assert [each.reason for each in decisions] == [each.reason for each in results[0][3]]


def test_sums_that_are_dropped_leave_nothing_behind():
    """Halves, whose sums are kept apart from `grad`, and what was learned from half a backward."""
    halves, singles = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(2))
    parameters = [("halves", halves), ("singles", singles)]
    sums = GradientSums(
        parameters, SoloGroup(1.0), bucket_bytes=4, wire="fp32", overlap=True, chunk_weights=lambda: (1,)
    )
    sums.begin()
    sums.begin_backward(last=True)
    singles.sum().backward()
    assert not sums.drop(), "nothing was launched: how many gradients to wait for was not known"
    for last in (False, True):
        sums.begin_backward(last=last)
        (halves.sum() + singles.sum()).backward()
    assert not sums.launched_too_early
    assert sums.drop(), "the last backward launches"
    sums.begin_backward(last=True)
    (halves.sum() + singles.sum()).backward()
    sums.launch_rest()
    sums.launch_again(overlap=True)
    sums.wait()
    assert float(sums.norm()) == pytest.approx(5**0.5)
    assert not sums.launched_too_early
    sums.close()


def memory_decisions(result):
    return [decision for decision in result[3] if decision.kind == "memory"]


PINNED = {"shares": (9, 9, 6)}
# Before anything is measured, shares that follow speed are equal; later, who has how many is luck.
KINDS = {
    "following": (1, {}, {}),
    "pinned": (FAILS_AT, {}, PINNED),
    "micro-batches": (FAILS_AT, {"micro_batch": 5}, PINNED),
    "after backward": (FAILS_AT, {"overlap": False}, PINNED),
    "fp16 scale": (FAILS_AT, {}, {"precision": "fp16", **PINNED}),
}


PHASES = ("forward", "backward")


def in_turn(names):
    return {name: globals()[name]() for name in names}


def by_name(world_size, *names):
    """Starting ranks takes longer than what they do here: once for many runs."""
    by_rank = run_ranks(world_size, in_turn, names, timeout=100)
    return {name: [results[name] for results in by_rank] for name in names}


@pytest.fixture(scope="module")
def three():
    return by_name(3, "train_kinds", "train_pulled", "unit_runs", "one_by_one", "rescuers")


@pytest.fixture(scope="module")
def two():
    return by_name(2, "second_unit_fails", "later", "messages_of_a_step")


def train_kinds():
    return {
        (phase, name): train(Fault(phase, 2, step=step), *kind)
        for phase in PHASES
        for name, (step, *kind) in KINDS.items()
    }


def test_smaller_micro_batches_give_the_same_gradient(three):
    values = expected()
    by_rank = three["train_kinds"]
    for name in by_rank[0]:
        results = [kinds[name] for kinds in by_rank]
        check_same(results, values)
        (decision,) = memory_decisions(results[0])
        assert decision.step == KINDS[name[1]][0]
        assert decision.plan.micro_batch[1] in (1, 2), name
        assert results[0][2].micro_batch[1] <= 2, "the limit is kept"
        assert "rank 1 ran out of memory: at most" in decision.reason
        tried = results[1][4]
        first_fit = next(place for place, samples in enumerate(tried) if samples <= 2)
        assert len(tried) > first_fit
        assert max(tried[first_fit:]) <= 2, "what did not fit is not tried again"


def train_pulled():
    settings = {"pull": True, "micro_batch": 4}
    return [train(Fault(phase, 1, ranks=(0, 2), step=6), settings, steps=14) for phase in PHASES]


def test_with_a_pulled_tail(three):
    for results in zip(*three["train_pulled"]):
        check_same(results, expected(14))
        for rank in (0, 2):
            assert max(results[rank][4], default=0) <= 1 or results[0][2].micro_batch[rank] == 1


def unit_run(fault, settings=None, options=None, kind="dropout batchnorm"):
    model, trainer = network(kind), None
    fault.watch(model, lambda: 0 if trainer is None else trainer._run.committed + 1)
    config = ragtag.Config(
        **{"unit": 2, "check_replicas_every": 1, "bucket_bytes": 1024, "recompute": False, **(settings or {})}
    )
    trainer = ragtag.Trainer(
        model, cases.adam(model), classify, images(), global_batch_size=18, config=config, **(options or {})
    )
    reports = list(trainer.steps(STEPS))
    plan, decisions = trainer.plan, trainer.decisions
    trainer.close()
    return cases.values(model), reports, plan, decisions, fault.tried


def unit_runs():
    following, pinned = [unit_run(Fault(phase, 0, step=1)) for phase in PHASES], {"shares": (6, 6, 6)}
    return [*following, *(unit_run(Fault(phase, 0), None, pinned) for phase in PHASES)]


def one_by_one():
    """Every unit is one sample with random numbers of its own; those who take over must not put them together."""
    return [unit_run(Fault(phase, 0), {"unit": 1}, {"shares": (6, 6, 6)}, kind="dropout") for phase in PHASES]


def second_unit_fails():
    return [unit_run(Fault(phase, 0, fitting=1), None, {"shares": (9, 9)}) for phase in PHASES]


def expected_units(kind="dropout batchnorm", unit=2):
    model = network(kind)
    plain_unit_run(model, cases.adam(model), classify_sum, images(), steps=STEPS, batch=18, unit=unit)
    return cases.values(model)


@pytest.mark.parametrize("runs", ["unit_runs", "one_by_one"])
def test_a_unit_that_does_not_fit_goes_to_others(three, runs):
    values = expected_units() if runs == "unit_runs" else expected_units("dropout", 1)
    for results in zip(*three[runs]):
        check_same(results, values)
        (decision,) = memory_decisions(results[0])
        assert [report.number for report in results[0][1] if report.shares[1]] == list(range(1, decision.step))
        assert results[0][2].shares[1] == 0
        assert "the least there is: no work for it from now on; shares " in decision.reason
        assert len(results[1][4]) == 1, "it was tried once"


def test_what_was_summed_before_is_given_in_unless_a_backward_failed(two):
    for kept, results in zip((2, 0), zip(*two["second_unit_fails"])):
        check_same(results, expected_units())
        assert results[0][1][FAILS_AT - 1].shares[1] == kept


def rescuers():
    """Rank 1 cannot do a single sample; then one of those who take over cannot do as many as it is given."""
    most = (3, 0, 24)[int(os.environ["RANK"])]
    return [train(Fault(phase, most, ranks=(0, 1)), {}, {"shares": (8, 8, 8)}) for phase in PHASES]


def test_those_who_take_over_may_run_out_too(three):
    for results in zip(*three["rescuers"]):
        check_same(results, expected())
        assert results[0][2].shares == (12, 0, 12)
        assert results[0][2].micro_batch[0] in (1, 2, 3)


def stalls_and_fails():
    """Rank 2's forward hangs until its stand-in has given its sum in, and then runs out of memory."""
    model, trainer = cases.mlp(), None
    hangs = os.environ["RANK"] == "2"

    def loss_fn(model, batch):
        nonlocal hangs
        time.sleep(0.002 * len(batch[0]))
        if hangs and trainer is not None and trainer._run.committed + 1 == 9:
            hangs = False
            end_s = time.monotonic() + 20
            stand_in: Any = trainer._cover
            while not stand_in._taken_over and time.monotonic() < end_s:
                time.sleep(0.005)
            raise torch.OutOfMemoryError("Tried to allocate 1 MiB")
        return cases.mean_squares(model, batch)

    config = ragtag.Config(check_replicas_every=1, bucket_bytes=1024)
    trainer = ragtag.Trainer(
        model, cases.adam(model), loss_fn, cases.regression(61), global_batch_size=24, config=config
    )
    reports = list(trainer.steps(14))
    plan, decisions = trainer.plan, trainer.decisions
    trainer.close()
    return cases.values(model), reports, plan, decisions, hangs


def test_a_rank_that_was_stood_in_for_meanwhile_throws_the_micro_batch_away():
    results = run_ranks(3, stalls_and_fails)
    check_same(results, expected(14))
    assert not memory_decisions(results[0])
    assert results[0][1][8].shares[2] == 0


def test_making_room_is_no_stall():
    with Watched() as watched:
        settling, stand_in = FakeSettling(), watched.stand_in
        settling.gate.set()
        with pytest.raises(StoodIn), stand_in.covering(settling):
            settling.started_s = watched.now_s
            stand_in.begin_micro_batch(8)
            stand_in.set_aside()
            watched.now_s += 5.0
            with stand_in._changed:
                assert stand_in._take_over() is None
            stand_in.begin_micro_batch(4)
            watched.now_s += 0.03
            with stand_in._changed:
                assert stand_in._take_over() is None, "what the failed one took does not count"
            watched.stall(settling)
            stand_in.set_aside()


def nobody(settings):
    if settings:
        return unit_run(Fault("backward", 0, ranks=(0, 1)), settings)
    return train(Fault("forward", 0, ranks=(0, 1)))


@pytest.mark.parametrize(
    ("settings", "says"), [({}, "1 sample in one forward"), ({"unit": 3}, r"Config\(unit=1\)")], ids=["sample", "unit"]
)
def test_where_nobody_can_all_end_with_one_error(settings, says):
    outcomes = run_ranks(2, nobody, settings, expect_failures=True)
    for outcome in outcomes:
        assert isinstance(outcome, ragtag.DeviceMemoryError)
        assert outcome.origin_rank == 0
        assert f"step {FAILS_AT}: " in str(outcome)
        assert "rank 0" in str(outcome)
        assert "rank 1" in str(outcome)
        assert "MiB" in str(outcome)
    assert str(outcomes[0]) == str(outcomes[1])
    with pytest.raises(ragtag.DeviceMemoryError, match=says):
        raise outcomes[0]


def later():
    """Rank 1 gives up in step 4; in step 6 rank 0 cannot either, but rank 1 has recovered."""
    fault = Fault("backward", 0, ranks=(0,), step=6)
    if os.environ["RANK"] == "1":
        fault = Fault("backward", 0, step=4, last=5)
    return train(fault, {}, {"shares": (12, 12)})


def test_a_rank_that_could_not_is_asked_again_before_all_is_lost(two):
    results = two["later"]
    check_same(results, expected())
    assert results[0][1][4].shares == (24, 0)
    assert results[0][1][6].shares == (0, 24)
    assert "rank 1 works again, with 1 sample at a time" in memory_decisions(results[0])[-1].reason


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_alone(phase, error):
    result = solo(train, Fault(phase, 7, ranks=(0,), step=1, error=error))
    check_same([result], expected())
    assert result[2].micro_batch == (6,)
    assert result[4][:2] == [24, 12]
    assert max(result[4][3:]) <= 6


class Recomputed(torch.nn.Module):
    """Its `block` is recomputed in backward; from some step on the output uses the block's weight once more, so that
    one gradient of it comes before the recomputation and one after."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.first, self.block = torch.nn.Linear(6, 16), torch.nn.Linear(16, 16, bias=False)
        self.head = torch.nn.Linear(16, 3)
        self.double()
        self.twice = False

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        hidden = checkpoint(self.block, hidden, use_reentrant=True, preserve_rng_state=False)
        return self.head(hidden) + (hidden @ self.block.weight)[:, :3] if self.twice else self.head(hidden)


def test_recomputation_fails_when_half_of_a_gradient_has_been_launched():
    model, failed = Recomputed(), []

    def in_block(module, inputs, output):
        if model.twice and torch.is_grad_enabled() and len(output) > 6:
            failed.append(len(output))
            raise torch.OutOfMemoryError("Tried to allocate 1 MiB")

    model.block.register_forward_hook(in_block)
    trainer = ragtag.Trainer(
        model, cases.adam(model), cases.mean_squares, cases.regression(61), global_batch_size=24,
        config=ragtag.Config(bucket_bytes=1024),
    )  # fmt: skip
    for report in trainer.steps(STEPS):
        model.twice = report.number + 1 >= FAILS_AT
    trainer.close()
    assert failed == [24, 12]

    plain, calls = Recomputed(), []

    def sum_loss(model, batch):
        calls.append(1)
        model.twice = len(calls) >= FAILS_AT
        return cases.sum_squares(model, batch)

    plain_run(plain, cases.adam(plain), sum_loss, cases.regression(61), steps=STEPS, batch=24)
    assert worst_difference(cases.values(model), cases.values(plain)) < 1e-12


def test_alone_with_nothing_smaller_left():
    with pytest.raises(ragtag.DeviceMemoryError, match=r"rank 0 .*Tried to allocate 1 MiB"):
        solo(train, Fault("backward", 0, ranks=(0,)))


def test_other_errors_end_the_run_as_before():
    with pytest.raises(RuntimeError, match="Tried to allocate 24 MiB"):
        solo(train, Fault("backward", 0, ranks=(0,), error=RuntimeError))


def test_what_counts_as_running_out_of_memory():
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert ran_out_of_memory(found.value)
    assert ran_out_of_memory(MemoryError())
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not ran_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not ran_out_of_memory(ValueError("DefaultCPUAllocator: can't allocate memory"))


def test_what_the_failed_micro_batch_held_is_freed_before_the_next_attempt():
    held, alive = [], []

    def loss_fn(model, batch):
        alive.append([each for each in held if each() is not None])
        activation = torch.tanh(model(batch[0]))
        if trainer is not None:
            held.append(weakref.ref(activation))
            if len(batch[0]) > 5:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.nn.functional.mse_loss(activation, batch[1])

    model, trainer = cases.mlp(), None
    trainer = ragtag.Trainer(model, cases.adam(model), loss_fn, cases.regression(61), global_batch_size=24)
    list(trainer.steps(1))
    trainer.close()
    assert len(held) >= 5
    assert not any(alive[-len(held) :]), "a failed forward's activations were still held"


def count_messages(group):
    calls = []
    for name in ("exchange", "gather", "barrier", "all_reduce", "broadcast"):
        original = getattr(group, name)

        def counting(*args, name=name, original=original, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        setattr(group, name, counting)
    return calls


def messages_of_a_step():
    model = cases.mlp()
    trainer = ragtag.Trainer(
        model, cases.adam(model), cases.mean_squares, cases.regression(61), global_batch_size=24, shares=(12, 12),
        config=ragtag.Config(check_replicas_every=0),
    )  # fmt: skip
    calls = count_messages(trainer._group)
    list(trainer.steps(3))
    trainer.close()
    return calls


def test_without_a_failure_a_step_takes_no_further_message(two):
    for calls in two["messages_of_a_step"]:
        assert sorted(calls) == ["all_reduce"] * 3 + ["exchange"] * 3


TRAIN = """
import sys, torch, ragtag
from tests.runtime import cases
torch.set_num_threads(1)
model = cases.mlp()
trainer = ragtag.Trainer(model, cases.adam(model), cases.mean_squares, cases.regression(96), global_batch_size=48)
list(trainer.steps(4))
if trainer.rank == 0:
    torch.save((cases.values(model), trainer.plan.micro_batch, [each.kind for each in trainer.decisions]), sys.argv[1])
trainer.close()
"""


def test_an_emulated_device_too_small_for_its_share_trains_on(tmp_path):
    """18 kB hold parameters, gradients, Adam's state and some 8 samples' activations, of the 24 that are planned."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "home.toml").write_text('[[device]]\nname = "box"\n[[device]]\nname = "laptop"\nmemory = "18kB"\n')
    command = [sys.executable, "-m", "ragtag.cli.main", "launch", "--emulate", "home.toml", "train.py", "out.pt"]
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    ended = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    values, micro_batch, kinds = torch.load(tmp_path / "out.pt")
    model = cases.mlp()
    plain_run(model, cases.adam(model), cases.sum_squares, cases.regression(96), steps=4, batch=48)
    assert worst_difference(values, cases.values(model)) < 1e-12
    assert micro_batch[1] <= 8
    assert "memory" in kinds
    assert "'laptop' is out of memory" in ended.stderr
    assert "rank 1 ran out of memory: at most" in ended.stderr
