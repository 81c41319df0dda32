import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.core.cluster import Device, Emulation
from ragtag.emulate.schedule import DeviceSchedule
from ragtag.sim.luck import hashed_names, slowdowns


@settings(max_examples=50)
@given(
    seed=st.integers(-3, 2**70),
    names=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3, unique=True),
    first=st.integers(1, 10**6),
    micro_batch=st.none() | st.integers(0, 5),
    jitter=st.floats(0.01, 1),
)
def test_virtual_devices_meet_the_luck_of_emulated_ones(seed, names, first, micro_batch, jitter):
    per = "step" if micro_batch is None else "micro_batch"
    emulation = Emulation(sample_s=1.0, jitter=jitter, jitter_per=per, seed=seed)
    steps = np.arange(first, first + 4, dtype=np.uint64)
    drawn = slowdowns(seed, hashed_names(names), steps, np.full(len(names), jitter), micro_batch)
    for column, name in enumerate(names):
        device = DeviceSchedule(device=Device(name=name), emulation=emulation)
        for row, step in enumerate(steps.tolist()):
            assert drawn[row, column] == pytest.approx(device.compute_s(step, micro_batch or 0, 1), rel=1e-5)


def test_without_jitter_nothing_is_slower():
    assert (slowdowns(0, hashed_names(["a", "b"]), np.arange(3, dtype=np.uint64), np.zeros(2)) == 1).all()


def test_luck_far_from_the_middle_is_that_of_a_normal_distribution():
    steps = np.arange(200_000, dtype=np.uint64)
    logs = np.log(slowdowns(1, hashed_names(["a"]), steps, np.ones(1)))
    assert abs(logs.mean()) < 0.01
    assert logs.std() == pytest.approx(1, abs=0.01)
    assert (np.abs(logs) > 3).mean() == pytest.approx(0.0027, abs=0.0006)
