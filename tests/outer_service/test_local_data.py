"""Handwritten digits sorted by label and pinned to sites: whose steps are few must not be whose classes are lost."""

import pytest
import torch
from sklearn.datasets import load_digits

from ragtag.outer.values import FragmentValues

SPEEDS = (1.0, 1.0, 0.5, 0.125)
ROUNDS, INNER_STEPS, BATCH, RATE = 60, 8, 16, 0.2


def trained(*, pinned: bool, seed: int) -> torch.Tensor:
    """Accuracy of each class after merging what sites of unequal speed have learnt from their own labels."""
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.argsort(targets, stable=True)
    shards = [order[len(order) * at // 4 : len(order) * (at + 1) // 4] for at in range(4)]
    luck = torch.Generator().manual_seed(seed)
    values = FragmentValues(torch.zeros(65 * 10))
    for _ in range(ROUNDS):
        for shard, speed in zip(shards, SPEEDS):
            weight = values.values.clone().view(65, 10).requires_grad_()
            steps = max(1, round(INNER_STEPS * speed))
            for _ in range(steps):
                batch = shard[torch.randint(len(shard), (BATCH,), generator=luck)]
                scores = inputs[batch] @ weight[:64] + weight[64]
                loss = torch.nn.functional.cross_entropy(scores, targets[batch])
                (slope,) = torch.autograd.grad(loss, weight)
                with torch.no_grad():
                    weight -= RATE * slope
            values.add(
                values.values - weight.detach().view(-1),
                tokens=float(BATCH * steps),
                steps=steps,
                base=values.version,
                pinned=len(shard) if pinned else 0,
            )
        values.close(rate=1.0, momentum=0.0, codec="fp32")
    weight = values.values.view(65, 10)
    right = (inputs @ weight[:64] + weight[64]).argmax(1) == targets
    return torch.stack([right[targets == label].float().mean() for label in range(10)])


@pytest.mark.parametrize("seed", range(2))
def test_weighting_by_tokens_loses_a_class_and_local_data_does_not(seed):
    assert float(trained(pinned=False, seed=seed).min()) < 0.05
    assert float(trained(pinned=True, seed=seed).min()) > 0.5
