"""What the machines of `test_elastic_hosts.py` run: it logs each committed step, and ends where a file says so."""

import os
import sys
import time
from pathlib import Path

import torch

import ragtag

DATA = [(torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(97)]


def train(directory: Path, *, pause_s: float = 0.0) -> list[float]:
    """Train to the step in the file `end`, once it is there; return the parameters."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    trainer = ragtag.Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        DATA,
        global_batch_size=14,
    )
    end = directory / "end"
    name = os.environ.get("RAGTAG_WORKER", "solo").replace("/", "-")
    with open(directory / f"{name}.{os.getpid()}.steps", "a", buffering=1) as log:
        for report in trainer.steps(1_000_000):
            print(report.number, report.loss.hex(), len(report.shares), file=log)
            if end.exists() and report.number >= int(end.read_text()):
                break
            time.sleep(pause_s)
    trainer.close()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    values = train(Path(sys.argv[1]), pause_s=0.05)
    name = os.environ["RAGTAG_WORKER"].replace("/", "-")
    (Path(sys.argv[1]) / f"{name}.{os.getpid()}.final").write_text("\n".join(value.hex() for value in values))
