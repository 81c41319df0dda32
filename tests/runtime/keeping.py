"""A run that keeps its own checkpoints, started, stopped and started again; importable by worker processes."""

import os
import signal

import torch
from tests.runtime import cases

import ragtag
from ragtag.runtime.stop_signals import Stopped


def train(directory, *, until, signals=(), **settings):
    """Train to step `until`; returns parameters, momentum, steps seen and how it ended.

    `signals` are (rank, step, number): what the rank sends itself in the loop's body after the step.
    """
    rank = int(os.environ.get("RANK", "0"))
    seen = {}

    def loss_fn(model, batch):
        x, y, index = batch
        seen.setdefault(step[0], []).extend(index.tolist())
        return cases.mean_squares(model, (x, y))

    x, y = cases.regression().tensors
    model = cases.mlp()
    optimizer = cases.sgd(model)
    step = [0]
    average = Average(model)
    trainer = ragtag.Trainer(
        model,
        optimizer,
        loss_fn,
        torch.utils.data.TensorDataset(x, y, torch.arange(len(x))),
        global_batch_size=8,
        state={"average": average},
        config=ragtag.Config(checkpoint=directory, bucket_bytes=1024, check_replicas_every=2, **settings),
    )
    step[0] = trainer._run.committed + 1
    started_at, numbers, status = trainer._run.committed, [], 0
    try:
        for report in trainer.steps(until):
            average.update()
            numbers.append(report.number)
            step[0] = report.number + 1
            for target, after, number in signals:
                if (target, after) == (rank, report.number):
                    os.kill(os.getpid(), number)
    except Stopped as stopped:
        status = stopped.code
    seen.pop(0, None)
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL or directory is None
    trainer.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    momentum = {str(key): value["momentum_buffer"] for key, value in optimizer.state_dict()["state"].items()}
    return {
        "values": {**cases.values(model), **{f"momentum {key}": value for key, value in momentum.items()}},
        "average": average.value,
        "started_at": started_at,
        "numbers": numbers,
        "status": status,
        "seen": seen,
    }


class Average:
    """An average of the parameters that the loop's body keeps: a checkpoint must come after the body."""

    def __init__(self, model):
        self.model = model
        self.value = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self):
        for name, parameter in self.model.named_parameters():
            self.value[name].lerp_(parameter.detach(), 0.25)

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = {name: value.clone() for name, value in state.items()}
