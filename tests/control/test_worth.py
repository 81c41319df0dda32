import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.simulated import Devices, equal_plan

from ragtag.control.controller import Controller
from ragtag.control.efficiency import eta
from ragtag.control.proposal import Limits
from ragtag.control.worth import gains, in_words


def settled(devices: Devices, batch: int, limits: Limits | None = None) -> Controller:
    controller = Controller(equal_plan(len(devices.speeds), batch), limits)
    for step in range(1, 31):
        controller.observe(devices.step(step, controller.plan))
    return controller


def gains_of(controller: Controller):
    return gains(controller.cluster, controller.plan, controller.limits)


def test_each_of_four_adds_what_the_others_would_need_longer_without_it():
    """Speeds 1, 1, 1/2, 1/4: without a rank of speed 1 the others have 1.75 of 2.75."""
    found = gains_of(settled(Devices(speeds=[1, 1, 0.5, 0.25]), 440))
    expected = [2.75 / 1.75 - 1, 2.75 / 1.75 - 1, 2.75 / 2.25 - 1, 2.75 / 2.5 - 1]
    assert [each.gain for each in found] == pytest.approx(expected, abs=0.02)
    assert [each.text for each in found][::3] == ["adds 57 %", "adds 10 %"]


def test_a_device_whose_optimizer_holds_everybody_up_costs():
    """Its update takes longer than the work that it takes off the others."""
    found = gains_of(settled(Devices(speeds=[1, 1, 0.05], apply_s=[0.0, 0.0, 0.9], comm_s=0.0), 100, Limits()))
    assert found[2].gain < 0 or found[2].text == "has no work"


def test_communication_counts():
    """Two equal ranks whose ring takes as long as half of the work: either adds 2 / 1.5 - 1."""
    found = gains_of(settled(Devices(speeds=[1, 1], comm_s=0.25), 100))
    with_s, alone_s = 0.5 + 0.25, 1.0
    assert [each.gain for each in found] == pytest.approx([alone_s / with_s - 1] * 2, abs=0.02)


def test_whose_share_nobody_else_has_room_for():
    found = gains_of(settled(Devices(speeds=[1, 1]), 100, Limits(caps=(60, 60))))
    assert [each.text for each in found] == ["is needed: the others have no room for its share"] * 2


def test_nothing_is_said_before_speeds_are_known():
    controller = Controller(equal_plan(3, 30))
    assert gains_of(controller) == ()


def test_words():
    assert [in_words(gain) for gain in (0.09, -0.04, 0.003, -0.003)] == [
        "adds 9 %", "costs 4 %", "adds nothing", "adds nothing",
    ]  # fmt: skip


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=8), st.floats(0.01, 10))
def test_eta_is_one_where_everybody_computes_all_the_time(sample_s, wall_s):
    shares = [wall_s / seconds for seconds in sample_s]
    assert eta(sum(shares), wall_s, sample_s) == pytest.approx(1.0)
    assert eta(sum(shares), 2 * wall_s, sample_s) == pytest.approx(0.5)


def test_eta_is_not_known_where_a_speed_is_not():
    assert eta(10, 1.0, [0.1, 0.0]) == 0.0
    assert eta(10, 0.0, [0.1]) == 0.0
    assert eta(10, 1.0, []) == 0.0
