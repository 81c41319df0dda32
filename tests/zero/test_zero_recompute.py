"""Activations that are computed again in backward, in other ways than block by block."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.ranks import run_ranks
from tests.runtime.reference import plain_run
from tests.zero.models import Tiny, Tokens, sum_loss
from tests.zero.test_zero_variety import BATCH, adam, assert_equal, train


class ToTheEnd(Tiny):
    """Goes through all of a block again, past the last activation that backward needs."""

    def forward(self, tokens):
        with set_checkpoint_early_stop(False):
            return self.computed(tokens)

    def computed(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Segments(Tiny):
    """Two blocks at a time, and what comes after the last one with it."""

    def forward(self, tokens):
        x = self.embed(tokens)
        first, second, third, fourth = self.blocks
        x = checkpoint(lambda x: second(first(x)), x, use_reentrant=False)
        return checkpoint(lambda x: self.head(fourth(third(x))), x, use_reentrant=False)


class SharedToTheEnd(ToTheEnd):
    """The same block again and again."""

    def computed(self, tokens):
        x = self.embed(tokens)
        for number in (0, 1, 0, 2, 0):
            x = checkpoint(self.blocks[number], x, use_reentrant=False)
        return self.head(x)


def made(kind, depth):
    torch.manual_seed(3)
    return kind(depth=depth).double()


def to_the_end():
    return made(ToTheEnd, 3)


def segments():
    return made(Segments, 4)


def shared_to_the_end():
    return made(SharedToTheEnd, 3)


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
@pytest.mark.parametrize("make", [to_the_end, segments, shared_to_the_end], ids=lambda each: each.__name__)
def test_trains_as_one_process(make, layout):
    results = run_ranks(3, train, make, adam, layout, 4, {"micro_batch": 4}, (7, 1, 4), False)
    model = make()
    plain_run(model, adam(model), sum_loss, Tokens(), steps=4, batch=BATCH)
    assert_equal(results[0], model)
