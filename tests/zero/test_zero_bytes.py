"""What each rank hands to the transport in a step, counted, against the formula."""

from typing import Any

import pytest
import torch

import ragtag
from ragtag.runtime.zero.schedule import Event, gathers
from ragtag.runtime.zero.sent import all_gather_elements, reduce_scatter_elements, sent_bytes
from tests.ranks import run_ranks
from tests.zero.models import Tokens, tiny
from tests.zero.test_zero_exact import adam, loss_fn
from tests.zero.test_zero_variety import frozen, recomputing, shared, tied


def count(make, layout, slices, micro_batch, wire):
    """Bytes that this rank sends in each of three steps, and what the formula says."""
    torch.set_num_threads(1)
    model = make()
    trainer = ragtag.Trainer(
        model,
        adam(model.parameters()),
        loss_fn,
        Tokens(),
        global_batch_size=12,
        shares=(7, 4, 1),
        config=ragtag.Config(layout=layout, slices=slices, micro_batch=micro_batch, wire=wire),
    )
    transport: Any = trainer._run.group._transport  # pyright: ignore[reportAttributeAccessIssue]
    sent = [0]
    send = transport.send

    def counting(tensor, peer, tag):
        sent[0] += tensor.nbytes
        return send(tensor, peer, tag)

    transport.send = counting
    counted, reported = [], []
    for report in trainer.steps(3):
        counted.append(sent[0])
        reported.append(report.sent_bytes[trainer.rank])
        sent[0] = 0
    expected = sent_bytes(trainer._run.sharding, trainer.rank, -(-7 // micro_batch), wire=wire)
    trainer.close()
    return counted, expected, reported


def single():
    return tiny(torch.float32)


def double():
    return tiny()


def half():
    return tiny(torch.bfloat16)


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("make", "slices", "micro_batch", "wire"),
    [
        (double, (5, 3, 1), 7, "fp32"),
        (double, (0, 1, 0), 3, "fp32"),
        (single, (5, 3, 1), 4, "bf16"),
        (half, (5, 3, 1), 4, "fp32"),
        (frozen, (1, 2, 3), 4, "fp32"),
        (tied, (5, 3, 1), 4, "fp32"),
        (shared, (5, 3, 1), 4, "fp32"),
        (recomputing, (5, 3, 1), 2, "fp32"),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_rank_sends_what_the_formula_says(make, layout, slices, micro_batch, wire):
    for counted, expected, reported in run_ranks(3, count, make, layout, slices, micro_batch, wire):
        assert counted == [expected] * 3
        # The vote is before parameters are gathered again where they are whole: those come with the next one.
        assert reported[1:] == [expected] * 2


def test_the_ring_passes_on_all_but_one_chunk():
    sizes = (5, 0, 2)
    assert [reduce_scatter_elements(sizes, rank) for rank in range(3)] == [2, 7, 5]
    assert [all_gather_elements(sizes, rank) for rank in range(3)] == [7, 5, 2]


def test_a_block_that_is_needed_again_at_once_is_not_gathered_twice():
    use, done, reduce = ([Event(kind, block) for block in (0, 1, 2)] for kind in ("use", "done", "reduce"))
    events = [use[1], done[1], use[2], done[2], use[2], reduce[2], use[1], reduce[1], reduce[0]]
    assert gathers(events) == {0: 1, 1: 2, 2: 1}
