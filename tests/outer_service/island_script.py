"""What each site of the tests runs: a small regression, and a line with what came of it."""

import json
import os
import sys
import time
from pathlib import Path

import torch

import ragtag


class Rows(torch.utils.data.Dataset):
    """A linear problem with noise, the same everywhere."""

    def __init__(self, size: int = 4096) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 24, generator=generator)
        w = torch.randn(24, 1, generator=generator)
        self.y = self.x @ w + 0.1 * torch.randn(size, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index], self.y[index]


def main() -> None:
    steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
    if "ISLAND_PIDS" in os.environ:
        place = f"{os.environ.get('RAGTAG_ISLAND', '')}-{os.environ.get('LOCAL_RANK', '')}"
        Path(os.environ["ISLAND_PIDS"], place).write_text(str(os.getpid()))
    torch.manual_seed(int(os.environ.get("RAGTAG_ISLAND") == "home"))
    model = torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def loss_fn(model, batch):
        if pause_s:
            time.sleep(pause_s)
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * steps))
    with ragtag.Trainer(model, optimizer, loss_fn, Rows(), global_batch_size=32, scheduler=scheduler) as trainer:
        first = None
        numbers = []
        for step in trainer.steps(steps):
            numbers.append(step.number)
            first = step.loss if first is None else first

        flat = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
        data = Rows()
        with torch.no_grad():
            loss = float(torch.nn.functional.mse_loss(model(data.x), data.y))
        if os.environ.get("LOCAL_RANK") == "0":  # whose output the launcher shows
            result = {
                "island": os.environ.get("RAGTAG_ISLAND", ""),
                "first_step": numbers[0] if numbers else 0,
                "last_step": numbers[-1] if numbers else 0,
                "loss": loss,
                "sum": float(flat.double().sum()),
                "norm": float(flat.double().norm()),
                "lr": optimizer.param_groups[0]["lr"],
            }
            print("RESULT " + json.dumps(result), flush=True)


main()
