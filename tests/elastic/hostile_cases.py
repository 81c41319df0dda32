"""What the hostile tests train, and what happens to whom at which place.

The one idea: a fault is (worker, place, how manieth time), so a test says exactly where a worker is killed, or finds
its generation ended although the others have finished that call.
"""

import os
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ragtag
from ragtag.comm.elastic import ElasticGroup
from ragtag.comm.passing import GenerationEnded, PassingGroup
from ragtag.runtime import regroup, step
from tests.elastic.crew import tell_step

SAMPLES = 96

PATIENCE_S = 4.0
SINK: dict[str, Any] = {
    "by_unit": True,
    "optimizer": "SGD",
    "settings": {"pull": True, "unit": 4, "check_replicas_every": 1},
    "arguments": {"loader": {"num_workers": 1, "multiprocessing_context": "fork"}},
}
"""What a run is made with that uses everything."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """At the `nth` time that worker `name` is at `place`: "kill" it, "stop" it until somebody wakes it, "tear" its call
    off when another one is lost, or let it "sleep"."""

    name: str
    place: str
    nth: int = 1
    act: str = "kill"
    seconds: float = 0.0
    """To sleep."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training script."""

    faults: tuple[Fault, ...] = ()
    steps: int = 12
    pause_s: float = 0.0
    """After each step, until worker `until` has done one."""
    until: str = "nobody"
    by_unit: bool = False
    optimizer: str = "AdamW"
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    def pause(self) -> None:
        if not Path(os.environ.get("CREW_DIRECTORY", ""), f"{self.until}.step").exists():
            time.sleep(self.pause_s)


class Places:
    """Counts how often this worker was where, and does what is to happen there."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._faults, self._seen = faults, Counter[str]()
        self.been: list[str] = []

    def at(self, place: str, group: Any = None) -> None:
        place = re.sub(r"\d+", "N", place)
        self._seen[place] += 1
        self.been.append(place)
        for fault in self._faults:
            if (fault.name, fault.place, fault.nth) != (os.environ.get("RAGTAG_WORKER"), place, self._seen[place]):
                continue
            if fault.act == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.act == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault.act == "sleep":
                time.sleep(fault.seconds)
            elif fault.act == "tear":
                end_s = time.monotonic() + 30
                while not group._broken:
                    assert time.monotonic() < end_s, "nobody was lost"
                    time.sleep(0.01)
                raise GenerationEnded(group._broken)


@contextmanager
def places(faults: tuple[Fault, ...]) -> Iterator[Places]:
    """Everything in here passes the places "before ..." and "after ..." of the group's calls, and of applying."""
    here = Places(faults)

    def passing(owner: Any, name: str, label: Any) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **words: Any) -> Any:
            place = label(*args, **words)
            group = args[0] if args and isinstance(args[0], PassingGroup) else None
            here.at(f"before {place}", group)
            result = original(*args, **words)
            here.at(f"after {place}", group)
            return result

        return mock.patch.object(owner, name, call)

    def doing(group: Any, payload: bytes, doing: str = "exchanging votes") -> str:
        return doing

    with ExitStack() as stack:
        for patch in (
            passing(PassingGroup, "gather", lambda group, name, value: name),
            passing(PassingGroup, "exchange", doing),
            passing(PassingGroup, "broadcast", lambda group, *args, **words: "broadcast"),
            passing(PassingGroup, "wait", lambda group, work, doing: f"wait {doing}"),
            passing(PassingGroup, "barrier", lambda group, doing: doing),
            passing(ElasticGroup, "ready", lambda group: "ready"),
            passing(step, "apply", lambda *args, **words: "apply"),
            passing(regroup, "apply", lambda *args, **words: "late apply"),
        ):
            stack.enter_context(patch)
        yield here


class Average:
    """An exponential moving average of the parameters, which the loop's body updates."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.values = [p.detach().clone() for p in model.parameters()]

    def update(self, model: torch.nn.Module) -> None:
        for value, parameter in zip(self.values, model.parameters()):
            value.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = [value.clone() for value in state["values"]]


def sample(index: int) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(6, dtype=torch.float64, generator=generator), index % 3


class Data:
    """Sample 17 is not finite where `poisoned`."""

    def __init__(self, poisoned: bool) -> None:
        self.poisoned = poisoned

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        features, label = sample(index)
        return (features * float("nan") if self.poisoned and index == 17 else features), label


def network(by_unit: bool) -> torch.nn.Sequential:
    torch.manual_seed(1)
    first, last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
    if by_unit:
        return torch.nn.Sequential(
            first, torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Tanh(), last
        ).double()
    return torch.nn.Sequential(first, torch.nn.Tanh(), last).double()


def cross_entropy(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def trainer_of(
    model: torch.nn.Module,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    loss_fn: Any = cross_entropy,
    data: Any = None,
    *,
    patience_s: float = PATIENCE_S,
    settings: dict[str, Any] | None = None,
    **arguments: Any,
) -> ragtag.Trainer:
    """A trainer of 16 samples a step, at a learning rate of 0.05."""
    return ragtag.Trainer(
        model,
        lambda parameters: optimizer(parameters, lr=0.05),  # pyright: ignore[reportCallIssue]  # each of torch's has one
        loss_fn,
        Data(False) if data is None else data,
        global_batch_size=16,
        config=ragtag.Config(patience_s=patience_s, **(settings or {})),
        **arguments,
    )


def train(case: Case) -> dict[str, Any]:
    """Train with everything that has to survive; return it, the reports and the places passed."""
    model = network(case.by_unit)
    average = Average(model)
    make = getattr(torch.optim, case.optimizer)
    words = {"momentum": 0.9} if case.optimizer == "SGD" else {}
    with places(case.faults) as here, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of steps that are skipped, as they are to be
        trainer = ragtag.Trainer(
            model,
            lambda parameters: make(parameters, lr=0.05, **words),
            cross_entropy,
            Data(case.by_unit),
            global_batch_size=16,
            shuffle=False,
            clip_norm=0.5,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7),
            state={"average": average},
            config=ragtag.Config(**{"patience_s": PATIENCE_S, **case.settings}),
            **case.arguments,
        )
        reports = []
        for report in trainer.steps(case.steps):
            average.update(model)
            reports.append((report.number, report.loss, report.lr, bool(report.skipped), len(report.shares)))
            tell_step(report.number)
            case.pause()
        score = float(trainer.evaluate(Data(False), cross_entropy))
        trainer.close()
    values = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers(), *average.values)]
    return {"values": values, "reports": reports, "score": score, "been": here.been, "shares": report.shares}


def same(result: Any, reference: dict[str, Any], *, first: int = 1) -> None:
    """Parameters, buffers, average, score and every report from step `first` on are those of the undisturbed run."""
    assert isinstance(result, dict), result
    for mine, expected in zip(result["values"], reference["values"], strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-9)
    assert abs(result["score"] - reference["score"]) < 1e-9
    expected_reports = reference["reports"][first - 1 :]
    assert [report[0] for report in result["reports"]] == [report[0] for report in expected_reports]
    for mine, expected in zip(result["reports"], expected_reports):
        assert mine[1:3] == pytest.approx(expected[1:3], abs=1e-9, nan_ok=True), (mine, expected)
        assert mine[3] == expected[3]
