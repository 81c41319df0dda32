"""Small models, data and losses that the runtime tests train; importable by worker processes."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import ragtag


def regression(size: int = 23, width: int = 6, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype),
    )


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)).to(dtype)


def mean_squares(model, batch):
    x, y = batch
    return functional.mse_loss(model(x), y)


def sum_squares(model, batch):
    """The same for the reference: a sum over samples and their number."""
    x, y = batch
    return functional.mse_loss(model(x), y) * len(x), len(x)


class Sentences(Dataset):
    """Token sequences of unequal length, some without any labelled token; labels of -100 are ignored."""

    def __init__(self, size: int = 29, empty_every: int = 4):
        generator = torch.Generator().manual_seed(9)
        self.rows = []
        for index in range(size):
            length = int(torch.randint(1, 12, (), generator=generator))
            tokens = torch.randint(0, 20, (length,), generator=generator)
            labels = torch.randint(0, 20, (length,), generator=generator)
            if index % empty_every == 1:
                labels = torch.full_like(labels, -100)
            self.rows.append({"tokens": tokens, "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def pad(rows):
    longest = max(len(row["tokens"]) for row in rows)
    return {
        "tokens": torch.stack([functional.pad(row["tokens"], (0, longest - len(row["tokens"]))) for row in rows]),
        "labels": torch.stack(
            [functional.pad(row["labels"], (0, longest - len(row["labels"])), value=-100) for row in rows]
        ),
    }


def tagger(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 20)).to(dtype)


def token_loss(model, batch):
    logits = model(batch["tokens"])
    count = (batch["labels"] != -100).sum()
    total = functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
    )
    right = ((logits.argmax(-1) == batch["labels"]) & (batch["labels"] != -100)).sum()
    return ragtag.Loss(total, count, {"accuracy": right})


def sum_tokens(model, batch):
    loss = token_loss(model, batch)
    return loss.total, float(loss.count)


def token_mean(model, batch):
    """The trap: a mean over tokens handed over as if it were one over samples."""
    logits = model(batch["tokens"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def adam(model, lr=1e-2):
    return torch.optim.Adam(model.parameters(), lr=lr)


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def values(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
