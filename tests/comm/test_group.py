import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from ragtag.core.errors import DisagreementError, PeerFailed, PeerLost, RagtagError
from tests.ranks import RankDied, join, run_ranks, solo


def everything():
    group = join()
    rank, world_size = group.rank, group.world_size
    results = {}
    ran = []
    flat = torch.arange(10_001, dtype=torch.float64) * (rank + 1)
    weighted = torch.full((257,), float(rank + 1))
    works = [
        group.all_reduce(flat, ready=lambda: ran.append("ready")),
        group.all_reduce(weighted, weights=[5, 0, 1, 3][:world_size], wire="bf16"),
    ]
    for work in works:
        group.wait(work, "summing")
    times = [time_s for work in works for time_s in (work.started_s, work.finished_s)]
    assert None not in times
    assert times == sorted(times, key=lambda time_s: time_s or 0.0), "one after another, each timed"
    results["flat"], results["weighted"], results["ran"] = flat, weighted, ran
    results["votes"] = group.exchange(bytes([rank, 255 - rank]))
    results["gathered"] = group.gather("speeds", {"rank": rank, "list": [0.5] * rank, "text": "ü" * rank})
    source = world_size - 1
    large = torch.full((1_500_000,), rank, dtype=torch.int64)
    tensors = [
        torch.tensor(float(rank)),
        torch.empty(0),
        torch.tensor([rank == source, True]),
        torch.full((3, 4), rank, dtype=torch.bfloat16).t(),
        torch.nn.Parameter(torch.full((2, 2), float(rank))),
        torch.full((5,), complex(rank, 1)),
        large,
    ]
    group.broadcast(tensors, source)
    results["broadcast"] = [tensor.detach().clone() for tensor in tensors[:-1]]
    assert (large == source).all()
    group.barrier("ending")
    return results


def assert_same(one, other):
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            assert_same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_calls_agree_on_every_rank(world_size):
    answers = run_ranks(world_size, everything)
    total, last = world_size * (world_size + 1) // 2, world_size - 1
    for answer in answers:
        assert_same(answer, answers[0])
    first = answers[0]
    assert_same(first["flat"], torch.arange(10_001, dtype=torch.float64) * total)
    assert_same(first["weighted"], torch.full((257,), float(total)))
    assert first["ran"] == ["ready"]
    assert first["votes"] == tuple(bytes([rank, 255 - rank]) for rank in range(world_size))
    assert first["gathered"] == tuple(
        {"rank": rank, "list": [0.5] * rank, "text": "ü" * rank} for rank in range(world_size)
    )
    scalar, empty, flags, half, parameter, numbers = first["broadcast"]
    assert scalar == last
    assert empty.numel() == 0
    assert flags.tolist() == [True, True]
    assert_same(half, torch.full((4, 3), last, dtype=torch.bfloat16))
    assert_same(parameter, torch.full((2, 2), float(last)))
    assert_same(numbers, torch.full((5,), complex(last, 1)))


def test_a_world_of_one_gives_the_same_kind_of_answers():
    answer = solo(everything)
    assert answer["ran"] == ["ready"]
    assert answer["votes"] == (b"\x00\xff",)
    assert answer["gathered"] == ({"rank": 0, "list": [], "text": ""},)
    assert_same(answer["flat"], torch.arange(10_001, dtype=torch.float64))


def groups_in_a_row(number):
    for turn in range(number):
        group = join()
        assert group.gather("turn", turn) == (turn,) * group.world_size
        flat = torch.ones(50_000)
        # The first to be done leaves at once, while others may still be receiving.
        group.wait(group.all_reduce(flat), "summing")
        assert flat.eq(group.world_size).all()
        assert group.close()
    own = {connection.laddr.ip for connection in psutil.Process().net_connections() if connection.status == "LISTEN"}
    return own


def test_groups_follow_one_another_and_listen_on_loopback_only():
    listening = run_ranks(3, groups_in_a_row, 6)
    assert set.union(*listening) == {"127.0.0.1"}


def fails_at_step(culprit, error, steps=20):
    group = join(patience_s=6.0)
    for step in range(1, steps):
        group.note(step, "computing gradients")
        if step == 7 and group.rank == culprit:
            raise error
        group.exchange(b"vote")
    raise AssertionError("the failure of another rank must have been raised")


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_reaches_every_rank_with_its_text(culprit):
    began_s = time.monotonic()
    outcomes = run_ranks(3, fails_at_step, culprit, OSError("no such sample: 17"), expect_failures=True)
    assert isinstance(outcomes.pop(culprit), OSError)
    for error in outcomes:
        assert isinstance(error, PeerFailed)
        assert (error.rank, error.origin_rank) == (culprit, culprit)
        for part in (f"Rank {culprit} (", "OSError: no such sample: 17", "step 7", "computing gradients"):
            assert part in str(error)
    assert time.monotonic() - began_s < 20


def test_an_interrupt_on_one_rank_reaches_every_rank():
    outcomes = run_ranks(3, fails_at_step, 2, KeyboardInterrupt(), expect_failures=True)
    assert isinstance(outcomes[2], KeyboardInterrupt)
    for error in outcomes[:2]:
        assert isinstance(error, PeerFailed)
        assert "Rank 2" in str(error)
        assert "was interrupted" in str(error)


def ends_early(culprit, patience_s):
    group = join(patience_s)
    for step in range(1, 6 if group.rank == culprit else 10):
        group.note(step, "training")
        group.wait(group.all_reduce(torch.ones(1000)), "summing gradients")


def test_a_rank_that_ends_its_script_early_is_named_at_once():
    began_s = time.monotonic()
    outcomes = run_ranks(3, ends_early, 1, 30.0, expect_failures=True)
    assert outcomes[1] is None
    for error in (outcomes[0], outcomes[2]):
        assert isinstance(error, PeerLost)
        assert error.rank == 1
        assert "Rank 1 (" in str(error)
        assert "ended its script at step 5" in str(error)
        assert "summing gradients" in str(error)
    assert outcomes[0].origin_rank == outcomes[2].origin_rank, "exactly one rank prints it"
    assert time.monotonic() - began_s < 15, "not after patience_s"


def receives_signal(culprit, number, patience_s, how):
    group = join(patience_s)
    began_s = time.monotonic()
    for step in range(1, 10):
        group.note(step, "training")
        if step == 4 and group.rank == culprit:
            os.kill(os.getpid(), number)
        try:
            if how == "ring":
                group.wait(group.all_reduce(torch.ones(1000)), "summing gradients")
            else:
                group.exchange(b"vote")
        except PeerLost as error:
            error.add_note(f"{time.monotonic() - began_s}")
            raise


@pytest.mark.parametrize(("culprit", "how"), [(0, "ring"), (1, "ring"), (2, "votes")])
def test_a_killed_rank_is_named_long_before_patience(culprit, how):
    outcomes = run_ranks(4, receives_signal, culprit, signal.SIGKILL, 20.0, how, expect_failures=True)
    killed = outcomes.pop(culprit)
    assert isinstance(killed, RankDied)
    assert killed.exit_status == -signal.SIGKILL
    for error in outcomes:
        assert isinstance(error, PeerLost), error
        assert error.rank == culprit
        assert f"ank {culprit} (" in str(error)
        assert "killed or crashed" in str(error)
        assert float(error.__notes__[0]) < 10
    assert len({error.origin_rank for error in outcomes}) == 1, "exactly one rank prints it"


def is_slow(seconds, patience_s):
    group = join(patience_s)
    group.exchange(b"vote")
    if group.rank == 1:
        group.note(3, "reading a sample")
        time.sleep(seconds)
    group.exchange(b"vote")
    return "came"


@pytest.fixture(scope="module")
def waited():
    """Outcomes of runs that mostly wait, side by side."""

    def frozen(culprit):
        living = tuple(rank for rank in range(3) if rank != culprit)
        arguments = (culprit, signal.SIGSTOP, 2.0, "ring")
        return run_ranks(3, receives_signal, *arguments, expect_failures=True, wait_for=living)

    runs = {
        "frozen 0": lambda: frozen(0),
        "frozen 1": lambda: frozen(1),
        "slow": lambda: run_ranks(2, is_slow, 2.0, 0.7, expect_failures=True),
        "never": lambda: run_ranks(2, is_slow, 60.0, 0.6, expect_failures=True, wait_for=(0,)),
    }
    with ThreadPoolExecutor(len(runs)) as pool:
        futures = {name: pool.submit(run) for name, run in runs.items()}
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_frozen_rank_is_named_within_patience(waited, culprit):
    living = [error for rank, error in enumerate(waited[f"frozen {culprit}"]) if rank != culprit]
    for error in living:
        assert isinstance(error, PeerLost), error
        assert error.rank == culprit
        assert f"ank {culprit} (" in str(error)
        assert 1.0 < float(error.__notes__[0]) < 4.0
    assert len({error.origin_rank for error in living}) == 1, "exactly one rank prints it"


def test_slow_is_not_dead_while_the_heart_beats(waited):
    assert waited["slow"] == ["came", "came"]


def test_a_rank_that_never_comes_is_named_with_what_it_does(waited):
    error = waited["never"][0]
    assert isinstance(error, PeerLost)
    assert error.rank == 1
    assert "Still behind: rank 1 (" in str(error)
    assert "reading a sample" in str(error)


def calls_differ(how):
    group = join(patience_s=30.0)
    odd = group.rank == 1
    if how == "kinds":
        group.gather("metrics", 1) if odd else group.exchange(b"a vote", "exchanging votes")
    elif how == "sizes":
        group.exchange(b"long vote" if odd else b"vote")
    elif how == "names":
        group.gather("speed" if odd else "memory", 1)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kinds", "rank 0 ({0}) and rank 2 are exchanging votes of 6 bytes; rank 1 ({0}) is gathering 'metrics'"),
        ("sizes", "votes of 4 bytes; rank 1 ({0}) is exchanging votes of 9 bytes"),
        ("names", "are gathering 'memory'; rank 1 ({0}) is gathering 'speed'"),
    ],
)
def test_ranks_that_make_different_calls_are_told_so_at_once(how, said):
    began_s = time.monotonic()
    errors = run_ranks(3, calls_differ, how, expect_failures=True)
    assert time.monotonic() - began_s < 20, "not after patience_s"
    assert any(isinstance(error, DisagreementError) for error in errors)
    for error in errors:
        assert isinstance(error, (DisagreementError, PeerFailed))
        assert "Ranks make different calls at the same point: rank 0" in str(error)
        assert said.format(socket.gethostname()) in str(error)
    own = {str(error) for error in errors if isinstance(error, DisagreementError)}
    assert len(own) == 1, "the same on every rank, so that one prints it"


def gathers_much():
    group = join()
    names = [f"transformer.layers.{index}.attention.projection.weight" for index in range(10_000)]
    everybody = group.gather("parameter names", names)
    try:
        group.gather("far too much", "x" * (65 << 20))
    except RagtagError as error:
        return everybody == (names, names), str(error)


def test_names_of_ten_thousand_parameters_can_be_gathered_and_too_much_is_refused():
    for same, refusal in run_ranks(2, gathers_much):
        assert same
        assert "gathering 'far too much' takes" in refusal
        assert "limit of 67108864" in refusal


def is_interrupted_while_it_votes():
    group = join()
    if group.rank == 2:
        end_s = time.monotonic() + 10
        while group.failure is None and time.monotonic() < end_s:
            time.sleep(0.01)
        time.sleep(0.5)  # its vote would complete that of whoever has not heard yet
    elif group.rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    group.exchange(b"vote")


def test_ctrl_c_ends_a_vote_at_once_everywhere():
    began_s = time.monotonic()
    outcomes = run_ranks(3, is_interrupted_while_it_votes, expect_failures=True)
    assert isinstance(outcomes[1], KeyboardInterrupt)
    for error in (outcomes[0], outcomes[2]):
        assert isinstance(error, PeerFailed)
        assert "Rank 1" in str(error)
        assert "was interrupted" in str(error)
    assert time.monotonic() - began_s < 20


def is_not_ready():
    group = join()

    def ready():
        raise ZeroDivisionError("the device is gone")

    group.wait(group.all_reduce(torch.ones(3), ready=ready if group.rank == 0 else None), "summing")


def test_an_error_of_ready_is_raised_where_it_happened():
    outcomes = run_ranks(2, is_not_ready, expect_failures=True)
    assert isinstance(outcomes[0], ZeroDivisionError)
    assert isinstance(outcomes[1], PeerFailed)
    assert "the device is gone" in str(outcomes[1])
