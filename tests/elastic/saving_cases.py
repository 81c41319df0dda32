"""Workers that keep checkpoints and are killed or frozen in the middle of it.

The one idea: a fault is (step, moment in writing), and the first writer that comes there has it; whoever does its work
afterwards does not. Before anything happens to it, the writer leaves a copy of what a reader would find then.
"""

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import ragtag
from ragtag.checkpoint import file as checkpoint_file
from ragtag.checkpoint.directory import POINTER, Directory
from ragtag.checkpoint.storage import LocalStorage
from tests.elastic.crew import tell_step

PATIENCE_S = 3.0
STEPS = 24
BY_HAND = ("nothing written", "half written", "written", "renamed")
AUTOMATIC = (*BY_HAND, "pointed", "removing")
DATA = [(torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(37)]
"""An epoch is 37 samples and a step 8, so that every save lies in the middle of one."""


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


class Samples:
    """An index stands for itself, so that a batch says what is in it."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> Any:
        return (*DATA[index], index)


def trainer_of(model: torch.nn.Module, loss_fn: Any = loss_fn, **settings: Any) -> ragtag.Trainer:
    return ragtag.Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        loss_fn,
        Samples(),
        global_batch_size=8,
        config=ragtag.Config(**{"patience_s": PATIENCE_S, "checkpoint_every_s": None, **settings}),
    )


def values_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def warnings_of_ragtag() -> list[str]:
    """What ragtag warns of in this process from now on."""
    said: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("ragtag").addHandler(Keeper(logging.WARNING))
    return said


Act = Callable[[str], None]


@contextmanager
def moments(act: Act) -> Iterator[None]:
    """Call `act` at each moment of every checkpoint that this process writes in here."""
    write, flush, point, remove = (
        checkpoint_file._write_through,
        checkpoint_file._flush_directory,
        LocalStorage.write_text,
        Directory._remove_older,
    )

    def writing(path: Path, fill: Any) -> None:
        act("nothing written")
        write(path, fill)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        act("half written")
        path.write_bytes(whole)
        act("written")

    def flushing(path: Path) -> None:
        flush(path)
        act("renamed")

    def pointing(storage: LocalStorage, name: str, text: str) -> None:
        point(storage, name, text)
        if name == POINTER:
            act("pointed")

    def removing(directory: Directory, *words: Any) -> None:
        remove(directory, *words)
        act("removing")

    with ExitStack() as stack:
        for owner, name, patch in (
            (checkpoint_file, "_write_through", writing),
            (checkpoint_file, "_flush_directory", flushing),
            (LocalStorage, "write_text", pointing),
            (Directory, "_remove_older", removing),
        ):
            stack.enter_context(mock.patch.object(owner, name, patch))
        yield


class Faults:
    """What happens at which moment of the checkpoint after which step, once in all of the crew."""

    def __init__(self, kept: Path, when: dict[int, str], what: str) -> None:
        self._kept, self._when, self._what = kept, when, what
        self.trainer: ragtag.Trainer | None = None
        self._crew = Path(os.environ.get("CREW_DIRECTORY", "."))
        self._name = os.environ.get("RAGTAG_WORKER", "")
        if self._name:
            (self._crew / f"{self._name}.pid").write_text(str(os.getpid()))

    def __call__(self, moment: str) -> None:
        step = 0 if self.trainer is None else self.trainer._run.committed
        if self._when.get(step) != moment or not self._name:
            return
        try:
            os.close(os.open(self._crew / f"fault-{step}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        shutil.copytree(self._kept, self._crew / f"seen-{step}")
        if self._what == "freeze the writer":
            (self._crew / f"frozen-{self._name}").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._what == "kill the writer":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            others = [file for file in sorted(self._crew.glob("*.pid")) if file.stem != self._name]
            os.kill(int(others[0].read_text()), signal.SIGKILL)
            others[0].unlink()
            time.sleep(0.3)  # it is noticed while this one writes


def save_by_hand(kept: Path, when: dict[int, str], what: str, pause_s: float = 0.0, pause_from: int = 0) -> Any:
    """Save to one file after every other step; return steps, values, and what a reader finds after each save."""
    faults, model = Faults(kept, when, what), model_of()
    found = []
    with moments(faults):
        trainer = faults.trainer = trainer_of(model)
        numbers = []
        for report in trainer.steps(STEPS):
            numbers.append(report.number)
            if report.number % 2 == 0:
                trainer.save(kept / "state.safetensors")
                found.append(checkpoint_file.load_file(kept / "state.safetensors")["committed"])
            tell_step(report.number)
            time.sleep(pause_s if report.number >= pause_from else 0.0)
        trainer.close()
    return {"numbers": numbers, "values": values_of(model), "found": found}


def keep(kept: Path, when: dict[int, str], what: str, pause_s: float = 0.0, pause_from: int = 0) -> Any:
    """The same with what is kept by itself."""
    faults, model = Faults(kept, when, what), model_of()
    with moments(faults):
        trainer = faults.trainer = trainer_of(model, checkpoint=str(kept), checkpoint_every_steps=2, checkpoint_keep=2)
        numbers = []
        for report in trainer.steps(STEPS):
            numbers.append(report.number)
            tell_step(report.number)
            time.sleep(pause_s if report.number >= pause_from else 0.0)
        trainer.close()
    return {"numbers": numbers, "values": values_of(model)}
