"""What stages send in a step, against the formula: activations one way, their gradients the other."""

from ragtag.runtime.pipe.traffic import HEADER_BYTES
from tests.pipe.staged import staged
from tests.ranks import run_ranks
from tests.zero.models import Tokens, tiny
from tests.zero.test_zero_exact import adam, loss_fn

WIDTH, LENGTH, BATCH = 12, 7, 12


def count(stages, micro_batch, shares):
    model = tiny(depth=4)
    settings = {"stages": stages, "micro_batch": micro_batch}
    trainer = staged(model, adam(model.parameters()), loss_fn, Tokens(), settings, batch=BATCH, shares=shares)
    found = [report.sent_bytes for report in trainer.steps(3)]
    trainer.close()
    return found


def test_a_stage_sends_activations_on_and_gradients_back():
    activations = BATCH * LENGTH * WIDTH * 8 + 3 * HEADER_BYTES  # three micro-batches of 5, 5 and 2
    for found in run_ranks(3, count, "0:0-1, 1:1-2, 2:2-4", 5, None):
        assert found == [(activations, 2 * activations, activations)] * 3


def test_what_several_hold_is_added_up_round_a_ring_of_them():
    parameters = sum(p.numel() for p in tiny(depth=4).parameters())
    passed = (BATCH // 2) * LENGTH * WIDTH * 8 + HEADER_BYTES
    sent = run_ranks(4, count, "0:0-2, 1:2-4 / 2:0-2, 3:2-4", 6, (0, 6, 0, 6))[0][-1]
    assert sum(sent) == 4 * passed + 2 * parameters * 8  # two holders: each sends all of it once
