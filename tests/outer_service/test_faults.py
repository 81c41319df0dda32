"""What goes wrong at one island stays its own: named in the log, worth nothing in the merge, and in nobody's way."""

import math

import pytest
import torch

from ragtag.core.errors import LaunchError
from ragtag.outer.protocol import Attached, Denied, Piece, Ready, Refused, Taken
from ragtag.watch.events import Exchanged, IslandChanged
from tests.outer_service.links import Link, Raw
from tests.outer_service.running import LONG_S, Island, OuterLoop, eventually, outer_loop


def values(numel=(300, 7), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(each, generator=generator) for each in numel]


@pytest.fixture
def running(tmp_path):
    with outer_loop(tmp_path) as loop:
        yield loop


@pytest.fixture
def home(running):
    """An island that everything has begun with, and that goes on whatever others do."""
    with Island(running.port, "home") as island:
        island.give(values())
        yield island


def said(running: OuterLoop, change: str, island: str) -> str:
    return running.await_event(IslandChanged, lambda event: (event.change, event.island) == (change, island)).text


def goes_on(home: Island, version: int) -> None:
    """A round that the others have no part in, or have left, and what comes of it."""
    before = home.own[0].clone()
    home.own[0] -= 1.0
    home.send(0)
    home.await_version(0, version)
    assert torch.allclose(home.own[0], before - 1.0, atol=1e-5)


def test_garbage_closes_that_connection_only(running, home):
    for garbage in (b"", b"\xff" * 40, b"\x04\x00\x00\x00{}xx", b"\x02\x00\x00\x00{}"):
        with Raw(running.port, "raw") as raw:
            raw.hear(Attached)
            raw.connection.send(garbage)
            raw.await_close()
    with Raw(running.port, attach=False) as stranger:
        stranger.say(Piece(key="k", offset=0, crc32=0))
        stranger.await_close()
    assert "no message of ragtag's" in said(running, "refused", "raw")
    goes_on(home, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused(running, home, bad):
    with Raw(running.port) as raw:
        raw.hear(Attached)
        delta = torch.zeros(300)
        delta[17] = bad
        raw.send(delta)
        assert "not finite" in raw.hear(Refused).reason
    assert "not finite" in said(running, "refused", "raw")
    goes_on(home, 2)


def test_an_absurd_norm_is_refused_once_the_usual_one_is_known(running, home):
    for version in (2, 3, 4):
        goes_on(home, version)
    with Raw(running.port) as raw:
        raw.hear(Attached)
        raw.send(torch.full((300,), 1e6), base=4)
        assert "absurd" in raw.hear(Refused).reason
    assert "absurd" in said(running, "refused", "raw")
    goes_on(home, 5)


def test_wrong_shapes_versions_and_fragments_are_refused(running, home):
    with Raw(running.port) as raw:
        raw.hear(Attached)
        raw.offer(torch.zeros(299))
        assert "wrong shape" in raw.hear(Refused).reason
        raw.offer(torch.zeros(300), fragment=9)
        assert "no fragment 9" in raw.hear(Refused).reason
        raw.send(torch.zeros(300), base=7)
        assert "which there is not yet" in raw.hear(Refused).reason
        raw.send(torch.zeros(300), sequence=2, tokens=-1.0)
        assert "tokens" in raw.hear(Refused).reason
    goes_on(home, 2)


def test_a_replayed_message_is_refused(running, home):
    with Raw(running.port) as raw:
        raw.hear(Attached)
        delta = torch.full((300,), 0.5)
        raw.send(delta)
        raw.hear(Taken)
        raw.offer(delta)
        assert "replayed" in raw.hear(Refused).reason
        assert "replayed" in said(running, "refused", "raw")
        home.own[0] -= 1.0
        home.send(0)
        home.await_version(0, 2)
        raw.offer(delta, base=2)
        assert "replayed" in raw.hear(Refused).reason
    merged = running.await_event(Exchanged)
    assert [each.island for each in merged.islands] == ["raw", "home"]


def test_another_runs_token_is_refused(running, home):
    spy = Island(running.port, "spy", token="another-runs-token")
    with pytest.raises(LaunchError, match="does not know this run's token"):
        spy.client.wait(lambda: False, LONG_S)
    spy.close()
    goes_on(home, 2)


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"run": "another"}, "of the run 'another'"),
        ({"version": "0.0.0"}, "ragtag 0.0.0"),
        ({"model": "other"}, "other parameters"),
        ({"numel": (300, 8)}, "other parameters"),
        ({"data": "local"}, "its data is"),
        ({"batch": 9}, "its global batch is 9"),
    ],
)
def test_islands_of_another_run_or_model_are_denied(running, home, about, reason):
    with Raw(running.port, **about) as raw:
        assert reason in raw.hear(Denied).reason
        raw.await_close()
    assert reason in said(running, "denied", "raw")
    goes_on(home, 2)


def test_an_island_vanishes_in_mid_transfer_and_goes_on_where_it_stopped(tmp_path):
    numel = (100_000, 7)
    with outer_loop(tmp_path) as running, Island(running.port, "home", numel) as home, Link(running.port) as link:
        home.give(values(numel))
        with Island(link.port, "cloud", numel) as cloud:
            cloud.take()
            cloud.own[0] += 2.0
            before = link.passed
            link.limit = before + 150_000
            cloud.send(0)
            text = said(running, "lost", "cloud")
            assert "in the middle of a transfer (delta of fragment 0" in text
            eventually(lambda: running.service.islands == ("home",))
            goes_on(home, 2)  # nobody waits for it
            link.mend()
            eventually(lambda: "cloud" in running.service.islands)
            home.send(0)
            cloud.await_version(0, 3)
            assert link.passed - before < 400_000 + 150_000  # not all of it again
            # Its delta, a round late, is worth half of what it would be.
            merged = running.await_event(Exchanged, lambda event: event.version == 3)
            ages = {each.island: each.age for each in merged.islands}
            assert ages == {"home": 0, "cloud": 1}
            weights = {each.island: each.weight for each in merged.islands}
            assert weights["cloud"] == pytest.approx(weights["home"] / 2)


def test_an_island_that_was_away_for_three_rounds_comes_back_with_an_old_state(running, home):
    with Link(running.port) as link, Island(link.port, "cloud") as cloud:
        cloud.take()
        cloud.own[0] += 0.5  # done before it was away
        link.cut()
        eventually(lambda: running.service.islands == ("home",))
        cloud.send(0)
        for version in (2, 3, 4):
            goes_on(home, version)
        link.mend()
        assert "older than 2 rounds" in said(running, "refused", "cloud")
        cloud.await_version(0, 4)
        assert torch.equal(cloud.client.talk.values.values[0], home.client.talk.values.values[0])
        # What it had done is still in its own values, and goes with its next delta.
        assert torch.allclose(cloud.own[0], home.own[0] + 0.5, atol=1e-5)
        cloud.send(0)
        home.send(0)
        cloud.await_version(0, 5)
        home.await_version(0, 5)
        assert torch.allclose(cloud.own[0], home.own[0], atol=1e-5)


def test_an_island_that_was_away_for_longer_fetches_the_values_whole(running, home):
    with Link(running.port) as link, Island(link.port, "cloud") as cloud:
        cloud.take()
        link.cut()
        eventually(lambda: running.service.islands == ("home",))
        for version in range(2, 9):
            goes_on(home, version)
        link.mend()
        cloud.await_version(0, 8)
        assert torch.equal(cloud.client.talk.values.values[0], home.client.talk.values.values[0])
        assert torch.allclose(cloud.own[0], home.own[0], atol=1e-5)


def test_bytes_changed_on_the_way_are_noticed_and_sent_again(tmp_path):
    numel = (100_000, 7)
    with outer_loop(tmp_path) as running, Island(running.port, "home", numel) as home, Link(running.port) as link:
        home.give(values(numel))
        with Island(link.port, "cloud", numel) as cloud:
            cloud.take()
            changed = []

            def flip(data: bytes) -> bytes:
                if changed or len(data) < 8000:
                    return data
                changed.append(1)
                return data[:6000] + bytes([data[6000] ^ 16]) + data[6001:]

            link.change = flip
            cloud.own[0] += 2.0
            cloud.send(0)
            eventually(lambda: changed)
            assert "changed on the way" in said(running, "refused", "cloud") or changed
            home.own[0] -= 1.0
            eventually(lambda: "cloud" in running.service.islands)
            home.send(0)
            cloud.await_version(0, 2)
            home.await_version(0, 2)
            assert torch.equal(cloud.client.talk.values.values[0], home.client.talk.values.values[0])


def test_a_link_that_stalls_holds_up_nobody_else(tmp_path):
    with (
        outer_loop(tmp_path, patience_s=0.4) as running,
        Island(running.port, "home", patience_s=0.4) as home,
        Link(running.port) as link,
    ):
        home.give(values())
        with Island(link.port, "cloud", patience_s=30.0) as cloud:  # it would wait itself
            cloud.take()
            link.stall()
            for version in (2, 3):
                goes_on(home, version)  # within quorum and grace, before the hub gives the other one up
            assert "nothing came for" in said(running, "lost", "cloud")
            goes_on(home, 4)
            link.flow()
            cloud.await_version(0, 4)
            assert torch.allclose(cloud.own[0], home.own[0], atol=1e-5)


def test_the_outer_process_ends_and_comes_back_from_its_journal(running, home):
    with Island(running.port, "cloud") as cloud:
        cloud.take()
        for island, change in ((home, -1.0), (cloud, 1.0)):
            island.own[0] += change
            island.send(0, tokens=8.0 if island is cloud else 24.0)
        for island in (home, cloud):
            island.await_version(0, 2)
        momentum = running.service.merging.fragments[0].values.momentum.clone()
        # One contribution is there, and is lost with the process.
        home.own[0] -= 1.0
        home.send(0, tokens=24.0)
        flights = home.client.talk.values.in_flight
        assert home.client.wait(lambda: 0 in flights and flights[0].taken, LONG_S)
        running.stop_outer()
        running.start_outer()
        service = running.service
        assert service.merging.fragments[0].values.version == 2
        assert torch.equal(service.merging.fragments[0].values.momentum, momentum)
        assert torch.equal(service.merging.fragments[0].values.values, cloud.client.talk.values.values[0])
        eventually(lambda: set(service.islands) == {"home", "cloud"})
        cloud.send(0)
        for island in (home, cloud):
            island.await_version(0, 3)
        assert torch.allclose(home.own[0], cloud.own[0], atol=1e-5)
        merged = running.await_event(Exchanged, lambda event: event.version == 3)
        assert {each.island for each in merged.islands} == {"home", "cloud"}


def test_the_hub_ends_and_comes_back_in_mid_transfer(tmp_path):
    numel = (300_000, 7)
    with outer_loop(tmp_path) as running, Island(running.port, "home", numel) as home:
        home.give(values(numel))
        home.own[0] -= 1.0
        home.send(0)
        running.stop_hub()
        running.start_hub()
        home.await_version(0, 2)


def test_a_damaged_file_is_named(tmp_path):
    from ragtag.outer.store import Store, StoreError

    with outer_loop(tmp_path) as running, Island(running.port, "home") as home:
        home.give(values())
        goes_on(home, 2)
    path = tmp_path / "outer" / "fragment-0.2"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    store = Store(tmp_path / "outer", run="r")
    with pytest.raises(StoreError, match=r"fragment-0\.2 is damaged"):
        store.load(0)
    store.close()


def test_whoever_warms_up_and_vanishes_is_replaced(tmp_path):
    with outer_loop(tmp_path, patience_s=0.3) as running:
        first = Island(running.port, "first")
        first.await_stage("alone")
        with Island(running.port, "second") as second:
            second.await_stage("wait")
            first.close()
            second.give(values())
            assert "in place of first" in " ".join(
                event.text for event in running.events() if isinstance(event, IslandChanged)
            )


def test_an_offer_that_goes_on_says_where(running, home):
    with Raw(running.port, "raw") as raw:
        raw.hear(Attached)
        raw.offer(torch.zeros(300))
        assert raw.hear(Ready).offset == 0
