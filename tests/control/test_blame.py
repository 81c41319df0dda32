import pytest
from tests.control.slowed import COMM_S, Devices, Slow, begun, detection, false_alarms

from ragtag.control.blame import Blame

CAUSES = {
    "a third slower": ("compute", {"factor": 1.33}),
    "three times slower": ("compute", {"factor": 3.0}),
    "1 ms more to read a sample": ("data", {"read_s": 1e-3}),
    "8 ms more to read a sample": ("data", {"read_s": 8e-3}),
    "links of 8 ms": ("link", {"link_s": 8e-3}),
    "links of 50 ms": ("link", {"link_s": 50e-3}),
    "memory that runs out": ("memory", {"runs_out": True, "redo_s": 20e-3}),
    "pages read from disk": ("memory", {"faults": 100, "factor": 1.5}),
    "10 ms of waiting for a processor": ("host", {"host_s": 10e-3}),
    "100 ms of waiting for a processor": ("host", {"host_s": 100e-3}),
}
UNEQUAL = {"shares": (16, 16, 8, 4), "sample_s": (0.005, 0.005, 0.01, 0.02)}
"""Shares in proportion to speed."""


# Each cause.


@pytest.mark.parametrize("onset", [1, 24])
@pytest.mark.parametrize("name", CAUSES)
def test_rank_and_cause_are_named_within_ten_steps_and_nobody_else_ever(name, onset):
    cause, words = CAUSES[name]
    for rank in range(4):
        slow = Slow(rank=rank, since=onset, **words)
        findings = Devices(forward_s=4e-3, slow=[slow], seed=rank).run(onset + 60)
        assert begun(findings) == [(rank, cause)]
        assert not findings[-1].over
        first = findings[0]
        assert onset <= first.step < onset + 10
        assert onset <= first.since_step <= onset + 2
        assert first.text.startswith(f"rank {rank} (dev{rank} on host{rank}) holds the others up by ")


def test_what_it_costs_is_told_in_seconds():
    [finding] = Devices(jitter=0, small=0, slow=[Slow(rank=1, since=30, factor=2.0)]).run(50)
    assert finding.lost_s == pytest.approx(0.040)
    assert "up by 40 ms a step: its device takes 80 ms for 8 samples instead of 40 ms" in finding.text


def test_a_link_costs_what_messages_are_under_way_for():
    [finding] = Devices(slow=[Slow(rank=2, since=30, link_s=0.02)]).run(50)
    assert finding.lost_s == pytest.approx(0.02 + COMM_S, rel=0.1)
    assert finding.since_step == 30, "votes tell of the step before"


def test_two_ranks():
    for rank in (0, 1):
        for words in ({"factor": 1.6}, {"read_s": 3e-3}, {"host_s": 0.05}):
            for since in (1, 30):
                findings = Devices(shares=(8, 8), slow=[Slow(rank=rank, since=since, **words)]).run(since + 9)
                assert [each[0] for each in begun(findings)] == [rank]


def test_two_slow_ranks_at_once_are_both_named():
    slow = [Slow(rank=1, since=30, factor=2.0), Slow(rank=3, since=30, read_s=5e-3)]
    assert sorted(begun(Devices(slow=slow).run(39))) == [(1, "compute"), (3, "data")]
    slow = [Slow(rank=1, factor=2.0), Slow(rank=3, factor=2.0)]
    assert sorted(begun(Devices(slow=slow).run(9))) == [(1, "compute"), (3, "compute")]


def test_the_second_slow_rank_is_named_when_it_begins():
    slow = [Slow(rank=1, since=30, factor=2.0), Slow(rank=3, since=50, factor=3.0)]
    findings = Devices(slow=slow).run(70)
    assert [(each.rank, each.since_step) for each in findings] == [(1, 30), (3, 50)]


def test_devices_of_different_kinds_are_compared_with_their_own_past():
    kinds = ("quick", "quick", "middling", "slow")
    findings = Devices(**UNEQUAL, kinds=kinds, slow=[Slow(rank=3, since=40, factor=1.8)]).run(49)
    assert begun(findings) == [(3, "compute")]
    assert findings[0].lost_s == pytest.approx(0.064, rel=0.1)


def test_memory_stays_the_cause_for_as_long_as_the_share_is_computed_in_pieces():
    devices = Devices(forward_s=4e-3, slow=[Slow(rank=1, since=30, redo_s=0.02, runs_out=True)])
    assert begun(devices.run(150)) == [(1, "memory")]


def test_memory_that_ran_out_in_an_earlier_generation():
    devices = Devices(forward_s=4e-3, slow=[Slow(rank=1, since=0, redo_s=0.02, runs_out=True)])
    [finding] = devices.run(60)
    assert (finding.rank, finding.cause) == (1, "memory")
    assert "its memory holds 1 sample at a time (others up to 8)" in finding.text


def test_long_after_memory_ran_out_a_slow_device_is_a_slow_device():
    slow = [Slow(rank=1, since=30, redo_s=0.02, runs_out=True), Slow(rank=1, since=120, factor=1.6)]
    assert begun(Devices(forward_s=0.1e-3, slow=slow).run(140)) == [(1, "memory"), (1, "compute")]


def test_a_host_that_keeps_what_receives_waiting_is_the_host_not_the_link():
    devices = Devices(slow=[Slow(rank=2, since=30, host_s=0.03, link_s=0.03)])
    assert [each[:2] for each in begun(devices.run(45))] == [(2, "host")]


def test_what_receives_from_others_is_kept_waiting():
    for rank in range(4):
        findings = Devices(slow=[Slow(rank=rank, since=30, receives_s=0.03)]).run(60)
        assert begun(findings) == [(rank, "host")]
        assert findings[0].step < 40
        assert "keeps what receives from the others waiting for 30 ms" in findings[0].text


def test_and_where_everybodys_is_nobody_is_blamed_for_a_link():
    slow = [Slow(rank=rank, since=30, receives_s=0.03) for rank in range(4)]
    assert Devices(slow=slow).run(80) == []
    one = Slow(rank=1, since=30, link_s=0.01)  # most of what its links take longer is what all wait for
    assert begun(Devices(slow=[*slow, one]).run(80)) in ([], [(1, "link")])


# How a finding goes on and ends.


def test_a_finding_ends():
    begins, ends = Devices(jitter=0, small=0, slow=[Slow(rank=1, since=30, until=50, factor=2.0)]).run(70)
    assert (begins.over, ends.over) == (False, True)
    assert 50 <= ends.step < 60
    assert (ends.rank, ends.cause, ends.since_step) == (begins.rank, begins.cause, begins.since_step)
    assert "held the others up by 40 ms a step, steps 30 to 49: its device takes 80 ms" in ends.text
    assert ends.lost_s == pytest.approx(0.040)


def test_and_may_begin_again():
    slow = [Slow(rank=1, since=since, until=since + 10, factor=2.0) for since in (30, 60)]
    findings = Devices(slow=slow).run(100)
    assert [(each.since_step, each.over) for each in findings] == [(30, False), (30, True), (60, False), (60, True)]


def test_a_finding_ends_once_shares_have_moved():
    def shares(step):
        return (8, 8, 8, 8) if step < 36 else (10, 10, 2, 10)

    findings = Devices(shares=shares, slow=[Slow(rank=2, since=30, factor=4.0)]).run(400)
    assert [(each.rank, each.over) for each in findings] == [(2, False), (2, True)]


def test_it_is_told_again_when_it_costs_twice_as_much():
    slow = [Slow(rank=1, since=since, factor=factor) for since, factor in ((30, 1.3), (60, 2.0))]
    first, second = Devices(slow=slow).run(100)
    assert (first.since_step, first.cause, first.over) == (second.since_step, second.cause, second.over)
    assert second.lost_s > 2 * first.lost_s
    assert 60 <= second.step < 70


@pytest.mark.parametrize("words", [{"factor": 2.0}, {"read_s": 6e-3}])
def test_every_fourth_step_is_one_finding_for_as_long_as_it_lasts(words):
    slow = [Slow(rank=2, since=step, until=step + 1, **words) for step in range(30, 200, 4)]
    begins, ends = Devices(slow=slow).run(260)
    assert (begins.over, ends.over) == (False, True)
    assert begins.step < 40
    assert ends.step > 198
    assert begins.since_step == 30
    assert ends.lost_s == pytest.approx(0.011, rel=0.2), "on average"


def test_another_cause_takes_the_place_of_the_first():
    slow = [Slow(rank=1, since=30, until=60, factor=2.0), Slow(rank=1, since=60, until=90, read_s=6e-3)]
    findings = Devices(slow=slow).run(120)
    told = [(each.cause, each.over) for each in findings]
    assert told == [("compute", False), ("compute", True), ("data", False), ("data", True)]
    assert findings[1].step == findings[2].step < 70
    assert "steps 30 to 59" in findings[1].text


# One step.


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ({"factor": 20.0}, "compute"),
        ({"read_s": 0.1}, "data"),
        ({"host_s": 0.6}, "host"),
        ({"redo_s": 0.6, "runs_out": True}, "memory"),
    ],
)
def test_a_single_huge_step_is_told_at_once_with_its_cause(words, cause):
    findings = Devices(slow=[Slow(rank=2, since=40, until=41, **words)]).run(80)
    assert [(each.rank, each.cause, each.since_step) for each in findings] == [(2, cause, 40)] * 2
    assert findings[0].step == 40
    assert [each.over for each in findings] == [False, True]


def test_a_step_that_is_huge_for_everybody_is_nobodys():
    slow = [Slow(rank=rank, since=40, until=41, factor=20.0) for rank in range(4)]
    assert Devices(slow=slow).run(80) == []


def test_a_single_step_that_is_a_little_longer_is_not_told():
    for words in ({"factor": 3.0}, {"read_s": 10e-3}, {"host_s": 0.1}, {"link_s": 0.1}):
        assert Devices(slow=[Slow(rank=2, since=40, until=41, **words)]).run(80) == []


# Nobody.


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_equal_devices_with_jitter(world_size):
    for jitter in (0.02, 0.3):
        make = lambda seed: Devices(shares=(8,) * world_size, jitter=jitter, seed=seed)  # noqa: B023, E731
        assert false_alarms(make, range(2), 1000) == 0


@pytest.mark.parametrize("jitter", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("kinds", [(), ("quick", "quick", "middling", "slow")])
def test_unequal_speeds_with_shares_to_match(jitter, kinds):
    make = lambda seed: Devices(**UNEQUAL, kinds=kinds, jitter=jitter, seed=seed)  # noqa: E731
    assert false_alarms(make, range(2), 1000) == 0


def test_devices_of_different_kinds_are_not_expected_to_be_equally_fast():
    devices = Devices(shares=(8,) * 4, sample_s=UNEQUAL["sample_s"], kinds=("a", "a", "b", "c"))
    assert devices.run(1000) == []


def test_odd_steps_that_everybody_has():
    assert false_alarms(lambda seed: Devices(odd=0.01, seed=seed), range(2), 1000) == 0
    assert false_alarms(lambda seed: Devices(odd=0.2, seed=seed), range(2), 1000) <= 10


@pytest.mark.parametrize("common", [0.1, 0.5])
def test_what_slows_all_of_them_down_at_once(common):
    assert Devices(common=common).run(1000) == []
    assert Devices(slow=[Slow(rank=rank, since=30, factor=2.0) for rank in range(4)]).run(100) == []
    assert Devices(slow=[Slow(rank=rank, since=30, link_s=0.02) for rank in range(4)]).run(100) == []


def test_first_steps_in_which_devices_warm_up():
    for seed in range(20):
        assert Devices(warms_up_s=1.0, jitter=0.1, seed=seed).run(30) == []


def test_a_rank_without_work():
    assert Devices(shares=(16, 16, 0, 8)).run(1000) == []


def test_a_rank_without_work_behind_a_slow_link():
    devices = Devices(shares=(16, 16, 0, 8), slow=[Slow(rank=2, since=30, link_s=0.02)])
    assert begun(devices.run(39)) == [(2, "link")]


@pytest.mark.parametrize("forward_s", [0.0, 0.02])
def test_shares_that_move(forward_s):
    def shares(step):
        return (8 + step % 7, 8, 8, 8 - step % 7)

    assert Devices(shares=shares, forward_s=forward_s, jitter=0.05).run(1000) == []


def test_one_rank():
    assert Devices(shares=(8,), slow=[Slow(rank=0, since=5, factor=3.0)]).run(40) == []


def test_votes_of_another_number_of_ranks_are_passed_over():
    blame = Devices().blame()
    assert blame.observe(Devices(shares=(8, 8)).step(1)) == ()
    assert blame.findings == ()


def test_an_older_state_is_loaded():
    devices = Devices(slow=[Slow(rank=1, since=30, factor=2.0)])
    blame = devices.blame()
    devices.run(45, blame)
    findings = devices.run(45, blame, first=20)
    assert [(each.rank, each.since_step, each.over) for each in findings] == [(1, 30, True), (1, 30, False)]
    assert findings[0].step == 20


def test_open_findings_are_known():
    devices = Devices(slow=[Slow(rank=1, since=30, until=50, factor=2.0)])
    blame = devices.blame()
    devices.run(45, blame)
    assert [(each.rank, each.cause) for each in blame.findings] == [(1, "compute")]
    devices.run(70, blame, first=46)
    assert blame.findings == ()


def test_no_rank_at_all():
    assert Blame([], [], []).findings == ()


# How often.


@pytest.mark.parametrize(
    ("words", "jitter", "least"),
    [
        ({"factor": 1.33}, 0.03, 0.97),
        ({"factor": 1.67}, 0.1, 0.95),
        ({"factor": 4.0}, 0.3, 0.85),
        ({"read_s": 4e-3}, 0.1, 0.95),
        ({"host_s": 0.03}, 0.1, 0.95),
        ({"link_s": 0.03}, 0.3, 0.95),
    ],
)
def test_how_often_it_is_found(words, jitter, least):
    rates = detection(
        lambda seed: Devices(jitter=jitter, seed=seed, slow=[Slow(rank=seed % 4, since=30, **words)]), 60, onset=30
    )
    assert rates.found >= least * rates.runs
    assert sorted(rates.steps)[len(rates.steps) // 2] <= 7


@pytest.mark.long
def test_false_alarms_in_ten_thousand_steps():
    for words in ({"jitter": 0.3}, {"jitter": 0.1, **UNEQUAL}, {"odd": 0.01}, {"common": 0.5}):
        assert false_alarms(lambda seed: Devices(seed=seed, **words), range(10), 4000) <= 1  # noqa: B023
    assert false_alarms(lambda seed: Devices(seed=seed, odd=0.05), range(10), 4000) <= 20
