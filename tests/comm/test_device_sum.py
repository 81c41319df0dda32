"""The path that sums on devices, with gloo in NCCL's place."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ragtag
from ragtag.comm.device_sum import ProcessGroupSum, require_nccl
from ragtag.comm.transport import TransportError
from ragtag.core.errors import SettingError
from tests.elastic.crew import Crew, tell_step
from tests.elastic.hostile_cases import Data, cross_entropy, network
from tests.ranks import run_ranks, solo


def gloo_sum(store, rank, world_size, patience_s):
    patience = timedelta(seconds=patience_s)
    return ProcessGroupSum(dist.ProcessGroupGloo(store, rank, world_size, patience), patience_s)


def train(steps: int, shares=None):
    model = network(False)
    with (
        mock.patch("ragtag.runtime.prepare.require_nccl"),
        mock.patch("ragtag.runtime.prepare.nccl_sum", gloo_sum),
    ):
        trainer = ragtag.Trainer(
            model,
            lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
            cross_entropy,
            Data(False),
            global_batch_size=16,
            shares=shares,
            config=ragtag.Config(reduce="nccl", patience_s=6.0, bucket_bytes=1024),
        )
        for report in trainer.steps(steps):
            tell_step(report.number) if "CREW_DIRECTORY" in os.environ else None
            time.sleep(0.02)
        used = trainer._group.device_sum is gloo_sum
        trainer.close()
    return used, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("shares", [None, (9, 7, 0)])
def test_the_trajectory_is_that_of_one_process(shares):
    _, expected = solo(train, 8)
    for used, values in run_ranks(3, train, 8, shares):
        assert used
        for mine, other in zip(values, expected):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


def test_a_killed_rank_ends_the_generation_and_the_others_go_on(tmp_path: Path):
    _, expected = solo(train, 30)
    with Crew(tmp_path, patience_s=6.0, expected=3) as crew:
        for name in "abc":
            crew.start(name, train, 30)
        crew.wait_for_step(8, "a", "b", "c")
        crew.signal("b", signal.SIGKILL)
        results = crew.results("a", "c")
    for result in results.values():
        assert isinstance(result, tuple), results
        for mine, other in zip(result[1], expected):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-9)


def test_what_the_process_group_raises_is_a_transport_error():
    class Broken:
        def allreduce(self, tensors):
            raise RuntimeError("NCCL communicator was aborted on rank 1.\n Exception raised from ...")

        def abort(self):
            self.aborted = True

    group = Broken()
    summing = ProcessGroupSum(group, 5.0)
    with pytest.raises(TransportError, match=r"^summing on devices: NCCL communicator was aborted on rank 1\.$"):
        summing.all_reduce(torch.zeros(3))
    summing.abort()
    summing.abort()
    assert group.aborted


def test_without_a_gpu_it_is_refused():
    with pytest.raises(SettingError, match=r"needs an NVIDIA GPU on every rank, but rank 2 \(desk\) computes on cpu"):
        require_nccl(torch.device("cpu"), 2, "desk")
