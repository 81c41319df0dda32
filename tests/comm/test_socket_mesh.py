import socket
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.comm.frame import PAYLOAD_LIMIT_BYTES, Frame, FrameError, FrameReader, encode, kind_of
from ragtag.comm.socket_mesh import SocketMesh
from tests.comm.test_ring import successes

END_S = 30.0


@pytest.fixture
def mesh():
    made: list[SocketMesh] = []

    def make(world_size: int, **options) -> list[SocketMesh]:
        made.extend(ends := SocketMesh.local(world_size, **options))
        return ends

    yield make
    for end in made:
        end.close()
        end._bell.close()


def advance_until(end: SocketMesh, done: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + END_S
    while not done():
        assert time.monotonic() < deadline_s, "a rank hangs"
        end.advance(1.0)


def call(end: SocketMesh, payload: bytes, name: str = "vote") -> tuple[bytes, ...]:
    end.begin(name, f"making a {name}", payload)
    advance_until(end, lambda: end.complete)
    return end.finish()


frames = st.builds(
    Frame,
    number=st.integers(0, 2**64 - 1),
    kind=st.integers(0, 2**32 - 1),
    doing=st.text(max_size=100),
    payload=st.binary(max_size=200),
)


@given(sent=st.lists(frames, max_size=5), cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_frames_come_out_as_they_went_in_however_they_are_cut(sent, cuts):
    content = b"".join(encode(frame) for frame in sent)
    places = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    reader = FrameReader()
    received = [frame for start, stop in pairwise(places) for frame in reader.feed(content[start:stop])]
    assert received == sent


def test_a_frame_says_too_much_only_up_to_a_limit():
    (frame,) = FrameReader().feed(encode(Frame(1, 2, "ü" * 3000, b"x")))
    assert frame.payload == b"x"
    assert 0 < len(frame.doing) < 3000
    huge = bytearray(encode(Frame(1, 2, "", b"")))
    huge[14:18] = (PAYLOAD_LIMIT_BYTES + 1).to_bytes(4, "big")
    with pytest.raises(FrameError, match=f"over {PAYLOAD_LIMIT_BYTES}"):
        FrameReader().feed(bytes(huge))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_rank_gets_every_ranks_payload_call_after_call(mesh, world_size):
    def calls(end):
        # Sizes that fit no buffer: all ranks send and receive at once.
        sizes = [1, 0, 3_000_000, 5, *range(100)]
        return [call(end, bytes([end.rank]) * size) for size in sizes]

    for answers in successes(mesh(world_size), calls):
        assert answers[0] == tuple(bytes([rank]) for rank in range(world_size))
        assert set(answers[1]) == {b""}
        assert answers[2] == tuple(bytes([rank]) * 3_000_000 for rank in range(world_size))
        assert len(answers) == 104


def test_a_rank_that_is_ahead_by_a_call_is_not_lost(mesh):
    first, second = mesh(2)
    first.begin("vote", "voting", b"1")
    second.begin("vote", "voting", b"2")
    advance_until(first, lambda: first.complete)
    assert first.finish() == (b"1", b"2")
    first.begin("vote", "voting", b"3")
    assert call_started(second) == (b"1", b"2")
    second.begin("vote", "voting", b"4")
    assert call_started(second) == (b"3", b"4")
    assert call_started(first) == (b"3", b"4")
    assert (first.num_begun, first.num_finished, second.num_finished) == (2, 2, 2)


def call_started(end: SocketMesh) -> tuple[bytes, ...]:
    advance_until(end, lambda: end.complete)
    return end.finish()


def test_different_calls_are_noticed_with_what_each_rank_does(mesh):
    ends = mesh(3)
    for end in ends:
        name = "vote" if end.rank != 1 else "gather"
        end.begin(name, f"making a {name}", b"")
    for end in ends:
        advance_until(end, lambda end=end: end.differs)
        advance_until(end, lambda end=end: end.complete)
        assert [end.answers[rank].doing for rank in range(3)] == ["making a vote", "making a gather", "making a vote"]


def test_a_closed_peer_is_an_error_only_where_it_is_missed(mesh):
    first, second, third = ends = mesh(3)
    successes(ends, lambda end: call(end, b"x"))
    first.begin("vote", "voting", b"1")
    second.begin("vote", "voting", b"2")
    third.begin("vote", "voting", b"3")
    third.close()
    advance_until(first, lambda: first.complete)
    assert first.error is None, "it had done its part"
    assert first.finish() == (b"1", b"2", b"3")
    first.begin("vote", "voting", b"4")
    second.advance(0)
    advance_until(first, lambda: first.error)
    assert first.error is not None
    assert first.error.peer == 2
    assert not first.complete
    assert "rank 2" in str(first.error)


def test_a_broken_connection_does_not_keep_a_rank_busy(mesh):
    first, _, third = mesh(3)
    first.begin("vote", "voting", b"1")
    third.close()
    advance_until(first, lambda: first.error)
    began_s = time.monotonic()
    first.advance(0.1)
    assert time.monotonic() - began_s >= 0.09


def test_its_own_closing_is_an_error_that_names_it(mesh):
    first, _ = mesh(2)
    first.close()
    first.begin("vote", "voting", b"")
    assert first.error is not None
    assert first.error.peer == 0


def test_a_bell_ends_a_wait_once(mesh):
    first, _ = mesh(2)
    bell = first._bell

    def ring():
        with bell.condition:
            bell.ring()
            bell.ring()

    ringer = threading.Timer(0.05, ring)
    ringer.start()
    began_s = time.monotonic()
    assert not first.advance(END_S), "there are news to look at"
    assert time.monotonic() - began_s < END_S / 2
    ringer.join()
    began_s = time.monotonic()
    first.advance(0.1)
    assert time.monotonic() - began_s >= 0.09, "it was heard"


def test_a_rank_out_of_step_is_an_error(mesh):
    first, second = mesh(2)
    first.num_begun = 7
    first.begin("vote", "voting", b"")
    second.begin("vote", "voting", b"")
    advance_until(second, lambda: second.error)
    assert "rank 0 is at call 8 instead of 1" in str(second.error)


def test_what_is_no_frame_is_an_error(mesh):
    ours, theirs = socket.socketpair()
    end = SocketMesh(0, {1: ours}, mesh(1)[0]._bell)
    with theirs:
        theirs.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" * 3)
        end.begin("vote", "voting", b"")
        advance_until(end, lambda: end.error)
        assert "frame" in str(end.error)
    end.close()


def test_a_slow_link_delays_what_is_sent_on_it_and_asks_for_its_bytes(mesh):
    asked = []

    def delay_s(peer: int, num_bytes: int) -> float:
        asked.append((peer, num_bytes))
        return 0.15 if peer == 1 else 0.0

    ends = mesh(3, delay_s=delay_s)
    began_s = time.monotonic()
    walls_s = successes(ends, lambda end: (call(end, b"x" * 1000), time.monotonic() - began_s)[1])
    assert min(walls_s) >= 0.15, "all wait for a slow link: 0 and 2 to send, 1 to receive"
    assert sorted(peer for peer, _ in asked) == [0, 0, 1, 1, 2, 2]
    assert {num_bytes for _, num_bytes in asked} == {len(encode(Frame(1, kind_of("x"), "making a vote", b"x" * 1000)))}


def test_calls_are_told_apart_by_their_text():
    assert len({kind_of(name) for name in ("exchange/1", "exchange/17", "gather/'a'", "gather/'b'", "barrier")}) == 5
