"""scikit-learn's handwritten digits: a small network with BatchNorm and dropout, and an exact validation accuracy.

    python -m ragtag.examples.digits
    ragtag launch --local 3 -m ragtag.examples.digits

BatchNorm and dropout make this model *non-separable*: what a sample contributes depends on its neighbours and on random
numbers. ragtag then cuts every batch into fixed units, so any number of ranks trains the same model.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import ragtag


def load() -> tuple[Dataset, Dataset]:
    """1,797 grey images of 8 x 8: 1,440 to train on, 357 to validate."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels)
    return TensorDataset(inputs[:1440], targets[:1440]), TensorDataset(inputs[1440:], targets[1440:])


def make_model() -> nn.Module:
    """Two convolutions, 20 k parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy."""
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Share of right answers."""
    images, labels = batch
    return (model(images).argmax(1) == labels).double().mean()


def main() -> None:
    """Train a few epochs, validate after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=96, help="global batch size")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    training, validation = load()
    model = make_model()
    trainer = ragtag.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss_fn,
        training,
        global_batch_size=arguments.batch,
    )
    steps_per_epoch = -(-1440 // arguments.batch)
    loss = 0.0
    for epoch in range(arguments.epochs):
        for step in trainer.steps(steps_per_epoch):
            loss = step.loss
        right = trainer.evaluate(validation, accuracy)
        if trainer.rank == 0:
            print(f"epoch {epoch + 1}  loss {loss:.4f}  validation accuracy {right:.6f}", flush=True)


if __name__ == "__main__":
    main()
