"""Running out of memory outside a step's micro-batches: in the optimizer, in an evaluation, in the trial before step 1.

An evaluation goes on in halves and gives the same value; where nothing smaller is left, one error says whose memory it
was, what did not fit and what to type next.
"""

import os
import re
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks, solo
from tests.runtime import cases
from torch import nn
from torch.nn import functional

import ragtag
from ragtag.core.errors import DeviceMemoryError, PeerFailed
from ragtag.emulate.memory import MemoryCap
from ragtag.runtime.evaluation_pieces import EvaluationPieces


def trainer_of(model: nn.Module, loss_fn: Any = cases.mean_squares, optimizer: Any = None, **words: Any):
    return ragtag.Trainer(
        model,
        cases.adam(model) if optimizer is None else optimizer,
        loss_fn,
        cases.regression(61),
        global_batch_size=24,
        **words,
    )


# An evaluation


def squares(model, batch):
    error = (model(batch[0]) - batch[1]).square().sum(1)
    return ragtag.Loss(error.sum(), len(error), {"near": int((error < 1).sum())})


def evaluate_three(most: int, rank: int, num_workers: int, error: Any) -> Any:
    """Three evaluations, of which each forward of more than `most` samples is too much for `rank`."""
    tried: list[list[int]] = []

    def metric_fn(model: nn.Module, batch: Any) -> Any:
        if int(os.environ.get("RANK", "0")) == rank:
            tried[-1].append(len(batch[0]))
            if len(batch[0]) > most:
                raise error("Tried to allocate 2 GiB")
        return squares(model, batch)

    model = cases.mlp()
    trainer = trainer_of(model, loader={"num_workers": num_workers}, config=ragtag.Config(micro_batch=10))
    values = []
    for _ in range(3):
        tried.append([])
        list(trainer.steps(2))
        value = trainer.evaluate(cases.regression(61), metric_fn)
        values.append((float(value), value.metrics, value.samples, value.weight))
    trainer.close()
    return values, tried


EVALUATIONS = {
    "half": (5, 1, 0, torch.OutOfMemoryError),
    "one": (1, 0, 0, MemoryError),
    "workers": (3, 1, 1, torch.OutOfMemoryError),
}


def evaluate_in_turn() -> Any:
    return {name: evaluate_three(*case) for name, case in EVALUATIONS.items()}


def test_an_evaluation_goes_on_in_halves_and_gives_the_same_value():
    expected, _ = solo(evaluate_three, 10**9, 0, 0, MemoryError)
    by_rank = run_ranks(2, evaluate_in_turn)
    for name, (most, rank, _, _) in EVALUATIONS.items():
        for values, _ in (results[name] for results in by_rank):
            assert values == by_rank[0][name][0], "the same on every rank"
            for mine, reference in zip(values, expected):
                assert mine[0] == pytest.approx(reference[0], abs=1e-12)
                assert mine[1]["near"] == pytest.approx(reference[1]["near"], abs=1e-12)
                assert mine[2:] == reference[2:]
        first, *later = by_rank[rank][name][1]
        assert max(first) > most
        in_vain = [size for size in first if size > most]
        assert len(in_vain) == len(set(in_vain)), "each size is tried in vain once"
        assert max(max(sizes) for sizes in later) <= most, "and not again in later evaluations"


def evaluate_in_vain() -> Any:
    def metric_fn(model: nn.Module, batch: Any) -> Any:
        if trainer.rank == 1:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB")
        return squares(model, batch)

    with trainer_of(cases.mlp()) as trainer:
        trainer.evaluate(cases.regression(61), metric_fn)


def test_an_evaluation_of_which_one_sample_does_not_fit_is_one_error_that_names_rank_and_device():
    first, second = run_ranks(2, evaluate_in_vain, expect_failures=True)
    assert isinstance(second, DeviceMemoryError)
    for part in ("rank 1 (", "cpu, ran out of memory: one sample", "bf16", "Tried to allocate 2 GiB"):
        assert part in str(second)
    assert isinstance(first, PeerFailed)
    assert "DeviceMemoryError: rank 1" in str(first)


def capped(cap_bytes: int, call: Any, model: nn.Module | None = None) -> Any:
    """What `call(trainer)` returns on an emulated device with so much memory."""
    trainer = trainer_of(model or cases.mlp(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    memory = MemoryCap(cap_bytes, device="laptop")
    memory.attach(trainer._run.model, trainer._run.optimizer)
    trainer._run.memory = memory
    with trainer:
        return call(trainer)


def test_an_emulated_devices_memory_bounds_an_evaluation(caplog):
    model = cases.mlp()
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    value = solo(capped, 1 << 30, lambda trainer: float(trainer.evaluate(cases.regression(61), squares)))
    assert not caplog.messages
    room = kept + 6 * 32 * 8  # the widest layer is given 16 numbers and returns 16, for each sample
    again = solo(capped, room, lambda trainer: float(trainer.evaluate(cases.regression(61), squares)))
    assert again == pytest.approx(value, abs=1e-12)
    (said,) = caplog.messages[:1]
    assert re.match(
        r"rank 0 \(\S+\), cpu, ran out of memory while evaluating 24 samples in one forward \(Emulated", said
    )
    with pytest.raises(DeviceMemoryError, match="Emulated device 'laptop' is out of memory"):
        solo(capped, kept + 8, lambda trainer: trainer.evaluate(cases.regression(61), squares))


def test_pieces_cover_each_sample_once():
    pieces = EvaluationPieces()
    done: list[tuple[int, int]] = []

    def forward(piece):
        if piece[1] - piece[0] > 3:
            raise MemoryError
        done.append(piece)

    for piece in ((0, 13), (13, 26), (26, 27)):
        pieces.compute(piece, forward, lambda: None, "rank 0", lambda: None)
    assert pieces.most == 3
    assert [each for start, stop in done for each in range(start, stop)] == list(range(27))


# The optimizer


class Greedy(torch.optim.Adam):
    """On rank 1 its state does not fit."""

    def step(self, closure: Any = None) -> Any:
        if int(os.environ.get("RANK", "0")) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().step(closure)


def step_in_vain() -> None:
    with trainer_of(cases.mlp(), optimizer=lambda parameters: Greedy(parameters)) as trainer:
        list(trainer.steps(3))


def test_an_optimizer_whose_state_does_not_fit_is_one_error_that_names_rank_and_device():
    first, second = run_ranks(2, step_in_vain, expect_failures=True)
    assert isinstance(second, DeviceMemoryError)
    for part in ("rank 1 (", "cpu, ran out of memory: the state that Greedy keeps", "its step 1", "SGD", "2 GiB"):
        assert part in str(second)
    assert isinstance(first, PeerFailed)
    assert "DeviceMemoryError: rank 1" in str(first)


def test_an_emulated_device_has_no_room_for_the_optimizers_state():
    model = cases.mlp()
    kept = sum(p.numel() * p.element_size() for p in model.parameters())

    def train(optimizer):
        trainer = trainer_of(cases.mlp(), optimizer=optimizer, config=ragtag.Config(micro_batch=1))
        memory = MemoryCap(3 * kept, device="laptop")
        memory.attach(trainer._run.model, trainer._run.optimizer)
        trainer._run.memory = memory
        with trainer:
            return len(list(trainer.steps(2)))

    assert solo(train, lambda parameters: torch.optim.SGD(parameters, lr=0.1)) == 2
    with pytest.raises(DeviceMemoryError, match=r"the state that Adam keeps.*for the optimizer's state"):
        solo(train, lambda parameters: torch.optim.Adam(parameters))


# The trial


class Small:
    """More than `most` samples in one forward are too many; how many were tried stands in `tried`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tried: list[int] = []

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.tried.append(len(batch[0]))
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB")
        return cases.mean_squares(model, batch)


@pytest.mark.parametrize("most", [4, 3, 1])
def test_the_trial_takes_fewer_samples_where_four_do_not_fit(most, caplog):
    loss = Small(most)

    def train():
        with trainer_of(cases.mlp(), loss, config=ragtag.Config(micro_batch=1)) as trainer:
            return trainer._run.nature.separable, len(list(trainer.steps(1)))

    assert solo(train) == (True, 1)
    said = [each for each in caplog.messages if "while trying the loss" in each]
    assert len(said) == {4: 0, 3: 1, 1: 2}[most]
    assert all(re.match(r"rank 0 \(\S+\), cpu, ran out", each) for each in said)


def test_the_trial_still_finds_a_mean_over_tokens_with_two_samples():
    def loss_fn(model, batch):
        if len(batch["tokens"]) > 2:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB")
        logits = model(batch["tokens"])
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def train():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
        ragtag.Trainer(
            model,
            cases.adam(model),
            loss_fn,
            cases.Sentences(empty_every=1000),
            global_batch_size=8,
            loader={"collate_fn": cases.pad},
        )

    with pytest.raises(ragtag.LossError, match="averaging over unequal pieces"):
        solo(train)


def try_in_vain() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), cases.mlp()).double()
    trainer_of(model, Small(1 if int(os.environ.get("RANK", "0")) == 0 else 99))


def test_a_trial_that_does_not_fit_is_one_error_that_names_rank_and_device():
    first, second = run_ranks(2, try_in_vain, expect_failures=True)
    assert isinstance(first, DeviceMemoryError)
    for part in ("rank 0 (", "cpu, ran out of memory: trying the loss on one sample", "bf16", "2 GiB"):
        assert part in str(first)
    assert isinstance(second, PeerFailed)


def test_an_emulated_devices_memory_bounds_the_trial(tmp_path, monkeypatch):
    (tmp_path / "home.toml").write_text('[[device]]\nname = "laptop"\nmemory = "3500B"\n')
    monkeypatch.setenv("RAGTAG_EMULATE", str(tmp_path / "home.toml"))
    with pytest.raises(DeviceMemoryError, match=r"trying the loss on one sample.*Emulated device 'laptop' is out of"):
        solo(trainer_of, cases.mlp())


def test_what_runs_out_of_memory_elsewhere_in_a_call_is_named_too(tmp_path):
    def load(trainer):
        trainer._run.model.load_state_dict = lambda state: (_ for _ in ()).throw(torch.OutOfMemoryError("no more"))
        trainer.save(tmp_path / "state")
        trainer.load(tmp_path / "state")

    with pytest.raises(DeviceMemoryError, match=r"rank 0 \(\S+\), cpu, ran out of memory: what loading .* needs"):
        solo(capped, 1 << 30, load)
