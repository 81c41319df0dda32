"""The stand-in itself: two threads of one rank, one at a time; and whatever may happen while a rank is away.

Stalls here end when something has happened, not after some time: a stalled thread asks its own stand-in.
"""

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.ranks import RankDied, run_ranks, solo
from tests.runtime import cases
from tests.runtime.reference import plain_run, worst_difference

import ragtag
from ragtag.core.errors import NonFiniteError, PeerFailed, PeerLost
from ragtag.runtime.stand_in import StandIn, StoodIn

LIMIT_S = 20.0


def until(condition: Callable[[], Any]) -> None:
    """Return once `condition` holds; give up after `LIMIT_S`, and let the test say what was missing."""
    end_s = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.005)


# ---- two threads, no group


class FakeGroup:
    """Nobody begins a step; `gate` says when a look at the notes comes back."""

    rank, world_size, patience_s, failure = 0, 2, 10.0, None

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.inside = False
        self.notes: list[str] = []

    def post(self, name):
        self.notes.append(name)

    def posted(self, name):
        return SimpleNamespace(result=name in self.notes)

    def wait(self, work, doing, until=None):
        self.inside = True
        self.gate.wait(LIMIT_S)
        self.inside = False


class FakeSettling:
    """Step `number`; `settle` returns or raises when `gate` opens."""

    regroups = False

    def __init__(self, number: int = 1, *, away: bool = False, error: BaseException | None = None) -> None:
        self.number, self.away, self.error, self.started_s = number, away, error, 0.0
        self.outcome: Any = None
        self.gate = threading.Event()

    def settle(self, compute):
        self.gate.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        self.outcome = "agreed"
        return True


class Watched:
    """A stand-in that knows steps of 0.1 s with 0.05 s of reading and forward, by a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.group = FakeGroup()
        self.run = SimpleNamespace(
            group=self.group,
            device=torch.device("cpu"),
            controller=None,
            absent=frozenset(),
            generation=0,
            num_settled=0,
            gradients_in_use=None,
        )
        self.stand_in = StandIn(self.run, clock=lambda: self.now_s)
        for _ in range(16):
            self.stand_in.finished(FakeSettling(), 0.1)
            self.micro_batch(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stand_in.close()

    def micro_batch(self, seconds: float) -> None:
        self.stand_in.begin_micro_batch(8)
        self.now_s += seconds
        self.stand_in.begin_forward()
        self.stand_in.begin_backward()

    def stall(self, settling: FakeSettling) -> None:
        """Inside `covering`: read or compute for so long that the stand-in takes over."""
        settling.started_s = self.now_s
        self.stand_in.begin_micro_batch(8)
        self.now_s += 5.0
        until(lambda: self.stand_in._taken_over)
        assert self.stand_in._taken_over, "nobody stood in"


def test_the_thread_that_comes_back_throws_its_micro_batch_away():
    with Watched() as watched:
        settling = FakeSettling()
        settling.gate.set()
        with pytest.raises(StoodIn), watched.stand_in.covering(settling):
            watched.stall(settling)
            watched.stand_in.begin_forward()
        assert watched.stand_in.settled(1) is settling
        assert watched.stand_in.settled(2) is None


def test_an_error_of_the_stand_in_waits_for_the_thread_however_late_it_comes():
    with Watched() as watched:
        settling = FakeSettling(error=PeerLost("gone"))
        settling.gate.set()
        with pytest.raises(StoodIn), watched.stand_in.covering(settling):
            watched.stall(settling)
            until(lambda: not watched.stand_in._acting)
            watched.stand_in.begin_backward()
        with pytest.raises(PeerLost, match="gone"):
            watched.stand_in.settled(1)
        assert watched.stand_in.settled(1) is None, "an error is raised once"


def test_only_one_thread_at_a_time_is_inside_the_group():
    with Watched() as watched:
        settling, group = FakeSettling(), watched.group
        settling.gate.set()
        with pytest.raises(StoodIn), watched.stand_in.covering(settling):
            watched.stall(settling)
            group.gate.clear()
            until(lambda: group.inside)
            watched.stand_in.begin_forward()
        assert group.inside
        opening = threading.Timer(0.1, group.gate.set)
        opening.start()
        assert watched.stand_in.settled(1) is settling
        assert group.gate.is_set()
        assert not group.inside
        opening.join()


def test_sums_are_not_dropped_while_they_are_given_in():
    with Watched() as watched:
        settling = FakeSettling(error=PeerFailed("this rank's own error, come back"))
        with pytest.raises(ValueError, match="disk"), watched.stand_in.covering(settling):
            watched.stall(settling)
            raise ValueError("the disk is gone")
        assert watched.stand_in._acting
        opening = threading.Timer(0.1, settling.gate.set)
        opening.start()
        watched.stand_in.withdraw()
        assert settling.gate.is_set()
        assert not watched.stand_in._acting
        opening.join()


def test_a_rank_that_is_late_again_and_again_is_slow_and_not_stood_in_for():
    with Watched() as watched:
        for _ in range(2):
            settling = FakeSettling()
            settling.gate.set()
            with pytest.raises(StoodIn), watched.stand_in.covering(settling):
                watched.stall(settling)
                watched.stand_in.begin_backward()
            assert watched.stand_in.settled(1) is settling
        settling = FakeSettling()
        with watched.stand_in.covering(settling):
            settling.started_s = watched.now_s
            watched.stand_in.begin_micro_batch(8)
            watched.now_s += 5.0
            assert watched.stand_in._take_over() is None
            watched.stand_in.begin_backward()


def test_a_loader_that_is_late_again_and_again_is_stood_in_for():
    """Its share does not follow the loader, so waiting for it would teach nothing."""
    with Watched() as watched:
        for _ in range(6):
            settling = FakeSettling()
            settling.gate.set()
            with pytest.raises(StoodIn), watched.stand_in.covering(settling):
                watched.stall(settling)
                watched.stand_in.begin_forward()
            assert watched.stand_in.settled(1) is settling


def test_catching_up_does_not_count_as_the_usual_step():
    with Watched() as watched:
        for _ in range(20):
            watched.stand_in.finished(FakeSettling(away=True), 0.0)
        assert watched.stand_in._usual_step_s == 0.1


def test_closing_ends_the_thread_whether_it_watches_or_waits_for_the_others():
    for stalled in (False, True):
        watched = Watched()
        if stalled:
            settling = FakeSettling()
            settling.gate.set()
            with watched.stand_in.covering(settling):
                watched.stall(settling)
                until(lambda watched=watched: watched.stand_in._settled)
        watched.stand_in.close()
        assert not watched.stand_in._thread.is_alive()


def test_a_note_of_a_step_that_is_done_again_after_a_load_is_another_note():
    with Watched() as watched:
        watched.run.absent, watched.run.num_settled = frozenset({1}), 12
        watched.stand_in.begin_step(13)
        watched.run.num_settled = 16
        watched.stand_in.begin_step(13)
        first, second = watched.group.notes
        assert first != second


# ---- real ranks


class Script:
    """A trainer of a small model whose ranks stall where they are told to."""

    def __init__(self, stalls: dict[tuple[int, int], Callable[["Script"], object]], **arguments: Any) -> None:
        """`stalls`: by rank and step, what is called once in that step's first forward there."""
        self.rank, self.stalls = int(os.environ.get("RANK", "0")), dict(stalls)
        self.sample_s = 0.003
        config = {"check_replicas_every": 1, "bucket_bytes": 1024, **arguments.pop("config", {})}
        self.model = arguments.pop("model", None) or cases.mlp()
        self.trainer: Any = None
        self.trainer = ragtag.Trainer(
            self.model,
            cases.adam(self.model),
            self.loss,
            cases.regression(48),
            global_batch_size=24,
            config=ragtag.Config(**config),
            **arguments,
        )

    @property
    def number(self) -> int:
        return 0 if self.trainer is None else self.trainer._run.committed + 1

    def loss(self, model, batch):
        time.sleep(self.sample_s * len(batch[0]))
        stall = self.stalls.pop((self.rank, self.number), None)
        if stall is not None:
            stall(self)
        return cases.mean_squares(model, batch)

    @property
    def cover(self):
        return self.trainer._cover


def settled(count: int) -> Callable[[Script], object]:
    """A stall that ends when the stand-in has settled `count` steps."""
    return lambda script: until(lambda: len(script.cover._settled) >= count)


def given_up(script: Script) -> None:
    """A stall that ends when the stand-in has given up, because nobody is left to do the work."""
    until(lambda: any(each.outcome is None for each in tuple(script.cover._settled)))


def same_as_one_process(values, steps):
    model = cases.mlp()
    plain_run(model, cases.adam(model), cases.sum_squares, cases.regression(48), steps=steps, batch=24)
    assert worst_difference(values, cases.values(model)) < 1e-10


def stall_in_the_last_step():
    script = Script({(1, 10): settled(1)})
    reports = list(script.trainer.steps(10))
    script.trainer.close()
    return cases.values(script.model), reports, script.trainer._group.failure


def test_the_others_may_leave_after_the_last_step_while_one_is_away():
    for values, reports, failure in run_ranks(2, stall_in_the_last_step):
        same_as_one_process(values, 10)
        assert reports[-1].shares[1] == 0, "nobody stood in"
        assert failure is None


def stall_while_one_is_away():
    script = Script({(1, 8): given_up, (0, 10): given_up})
    reports = list(script.trainer.steps(14))
    script.trainer.close()
    return cases.values(script.model), reports


def test_when_nobody_is_left_a_rank_that_was_away_computes_with_sums_of_its_own():
    for values, reports in run_ranks(2, stall_while_one_is_away):
        assert [report.shares[1] for report in reports[7:10]] == [0, 0, 12], "not what this test is about"
        same_as_one_process(values, 14)


def freeze_skip_and_follow_a_schedule():
    stalls = {(1, 8): settled(2), (1, 14): settled(4)} if "RANK" in os.environ else {}
    torch.manual_seed(3)
    layers = [torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)]
    model = torch.nn.Sequential(*layers).double()
    model[2].requires_grad_(False)
    script = Script(
        stalls,
        model=model,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0),
    )
    whole, reports = script.loss, []
    script.trainer._run.loss_fn = lambda *given: whole(*given) * (float("nan") if script.number == 15 else 1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="step 15 skipped")
        for report in script.trainer.steps(20):
            reports.append(report)
            if report.number == 9:
                model[2].requires_grad_(True)
                model[0].requires_grad_(False)  # as many parameters, of the same shapes
    script.trainer.close()
    return cases.values(model), [(report.lr, bool(report.skipped)) for report in reports], reports


def test_what_scripts_do_between_steps_and_steps_that_are_skipped():
    alone, rates, _ = solo(freeze_skip_and_follow_a_schedule)
    assert rates[14][1]
    assert len({rate for rate, _ in rates}) > 3, "the schedule does nothing"
    for values, own, reports in run_ranks(2, freeze_skip_and_follow_a_schedule):
        assert [reports[step - 1].shares[1] for step in (8, 9, 14, 15, 17)] == [0] * 5, "nobody stood in"
        assert [skipped for _, skipped in own] == [skipped for _, skipped in rates]
        assert [rate for rate, _ in own] == pytest.approx([rate for rate, _ in rates], rel=1e-12)
        assert worst_difference(values, alone) < 1e-10


def get_slow():
    script = Script({})
    for report in script.trainer.steps(45):
        if report.number == 10 and script.rank == 1:
            script.sample_s *= 10
    script.trainer.close()
    return cases.values(script.model), report


def test_a_rank_that_gets_slow_is_measured_and_gets_less():
    for values, report in run_ranks(2, get_slow):
        same_as_one_process(values, 45)
        assert 0 < report.shares[1] <= 6


def fail(how):
    def stall(script):
        if how == "killed":
            settled(1)(script)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "Ctrl-C":
            settled(2)(script)
            raise KeyboardInterrupt
        until(lambda: script.cover._error is not None or script.trainer._group.failure is not None)

    def break_down(script):
        if how == "another fails":
            time.sleep(0.4)
            raise ValueError("the other one")

    script = Script({(1, 8): stall, (0, 8): break_down}, config={"patience_s": 4})
    list(script.trainer.steps(2000))


@pytest.mark.parametrize(
    ("how", "kinds", "text"),
    [
        ("another fails", (ValueError, PeerFailed), "the other one"),
        ("Ctrl-C", (PeerFailed, KeyboardInterrupt), "Ctrl-C"),
        ("killed", (PeerLost, RankDied), "Rank 1"),
    ],
    ids=["another fails", "Ctrl-C", "killed"],
)
def test_failures_while_a_rank_is_away_reach_every_rank(how, kinds, text):
    outcomes = run_ranks(2, fail, how, expect_failures=True)
    for outcome, kind in zip(outcomes, kinds):
        assert isinstance(outcome, kind), outcome
    assert text in str(next(outcome for outcome in outcomes if isinstance(outcome, PeerFailed | PeerLost)))


def be_away_while_all_is_nan():
    script = Script({(1, 8): lambda script: until(lambda: script.cover._error)})
    whole = script.loss
    script.trainer._run.loss_fn = lambda *given: whole(*given) * (float("nan") if script.number > 8 else 1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="step 9 skipped")
        list(script.trainer.steps(60))


def test_an_error_that_all_ranks_raise_is_raised_by_the_one_that_was_away_too():
    for outcome in run_ranks(2, be_away_while_all_is_nan, expect_failures=True):
        assert isinstance(outcome, NonFiniteError), outcome


def stall_longer_than_patience():
    script = Script({(1, 8): lambda script: until(lambda: script.cover._settled and not script.cover._acting)})
    group = script.trainer._group
    group.patience_s = 0.4  # of the stand-in alone; the group knows its own
    notes, post = [], group.post

    def noting(name):
        notes.append(name)
        return post(name)

    group.post = noting
    reports = list(script.trainer.steps(40))
    kept = [group._claims_store.check([f"posted/{name}"]) for name in notes]
    script.trainer.close()
    return cases.values(script.model), reports, kept


def test_after_patience_s_the_others_wait():
    results = run_ranks(2, stall_longer_than_patience)
    for values, reports, _ in results:
        same_as_one_process(values, 40)
        away = [report.number for report in reports if report.number > 8 and report.shares[1] == 0]
        assert 1 < len(away) < 30
        assert reports[-1].shares[1] > 0
    kept = results[0][2]
    assert len(kept) > 1, "the rank that went on said so"
    assert kept == [False] * (len(kept) - 1) + [True], "notes of past steps are taken back"


def two_trainers():
    scripts = [Script({(1, 8): settled(1)}), Script({(0, 10): settled(1)})]
    for _ in zip(*(script.trainer.steps(20) for script in scripts)):
        pass
    for script in scripts:
        script.trainer.close()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("ragtag")]
    return [cases.values(script.model) for script in scripts], threads


def test_two_trainers_in_one_process_leave_nothing_behind():
    for values, threads in run_ranks(2, two_trainers):
        for each in values:
            same_as_one_process(each, 20)
        assert not threads


class Napping:
    """A dataset that sometimes takes its time, differently on every rank; importable by loader workers."""

    def __init__(self) -> None:
        self.dataset = cases.regression(48)
        self.random = random.Random(int(os.environ["RANK"]))

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        time.sleep(0.25 if self.random.random() < 0.01 else 0.0005)
        return self.dataset[index]


def stall_at_random(settings, loader):
    model = cases.mlp()
    naps = random.Random(100 + int(os.environ["RANK"]))
    trainer: Any = None
    surely = os.environ["RANK"] == "1"

    def loss_fn(model, batch):
        nonlocal surely
        if surely and trainer is not None and trainer._run.committed == 12:
            surely = False
            until(lambda: trainer._cover._settled)
        time.sleep(0.001 * len(batch[0]) + (0.3 if naps.random() < 0.06 else 0.0))
        return cases.mean_squares(model, batch)

    config = ragtag.Config(check_replicas_every=1, bucket_bytes=1024, **settings)
    trainer = ragtag.Trainer(
        model, cases.adam(model), loss_fn, Napping(), global_batch_size=24, config=config, loader=loader
    )
    away = 0
    for _ in trainer.steps(24):
        away += bool(trainer._run.absent)
    score = trainer.evaluate(cases.regression(10), cases.mean_squares)
    trainer.close()
    return cases.values(model), away, float(score)


@pytest.mark.parametrize(
    ("world_size", "settings", "loader"),
    [
        (4, {"pull": True, "micro_batch": 2}, {}),
        pytest.param(3, {"micro_batch": 4}, {"num_workers": 1}, marks=pytest.mark.long),
    ],
    ids=["pulled", "workers"],
)
def test_whatever_stalls_whenever_the_gradient_is_that_of_one_process(world_size, settings, loader):
    results = run_ranks(world_size, stall_at_random, settings, loader)
    assert results[0][1] > 0, "nobody was ever stood in for"
    for values, _, score in results:
        same_as_one_process(values, 24)
        assert score == results[0][2]
