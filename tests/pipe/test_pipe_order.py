"""Turns of a stage: those of torch's own schedule, and no more kept than it keeps."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.distributed.pipelining.schedules import _ComputationType as Kind

from ragtag.runtime.pipe.order import turns


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("more", [0, 1, 4])
def test_the_order_is_that_of_torch(num_stages, more):
    count = num_stages + more
    schedule = SimpleNamespace(_num_stages=num_stages, _n_microbatches=count)
    expected: Any = Schedule1F1B._get_pipeline_order(schedule)  # pyright: ignore[reportArgumentType]
    for stage in range(num_stages):
        theirs = [
            action.computation_type is Kind.FORWARD
            for action in expected[stage]
            if action is not None and action.computation_type in (Kind.FORWARD, Kind.FULL_BACKWARD)
        ]
        ours = list(turns(count, stage, num_stages))
        assert [turn.forward for turn in ours] == theirs
        for forward in (True, False):
            assert [turn.number for turn in ours if turn.forward is forward] == list(range(count))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_micro_batches_than_stages(count):
    for stage in range(4):
        found = list(turns(count, stage, 4))
        assert [turn.number for turn in found if turn.forward] == list(range(count))
        assert [turn.number for turn in found if not turn.forward] == list(range(count))


def test_what_is_under_way_is_bounded_by_the_stages_that_follow():
    for stage in range(3):
        under_way = most = 0
        for turn in turns(20, stage, 3):
            under_way += 1 if turn.forward else -1
            most = max(most, under_way)
        assert most == 3 - stage
