"""Islands over real sockets: values begin alike, merges are weighted, what arrives is added, H = 1 is exact."""

import pytest
import torch

from ragtag.outer.protocol import Detach, Wanted
from ragtag.watch.events import Exchanged, IslandChanged
from tests.outer_service.running import Island, eventually, outer_loop


def _values(numel=(300, 7), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(each, generator=generator) for each in numel]


def test_the_second_island_begins_with_the_values_and_the_state_of_the_first(tmp_path):
    with outer_loop(tmp_path) as running, Island(running.port, "home") as home, Island(running.port, "cloud") as cloud:
        values = _values()
        first, second = (
            (home, cloud) if home.client.wait(lambda: home.client.talk.stage == "alone", 1.0) else (cloud, home)
        )
        first.give(values, state=b"s" * 200_000, step=5)
        assert second.take() == b"s" * 200_000
        assert all(torch.equal(own, value) for own, value in zip(second.own, values))
        assert second.client.talk.step == 5


def test_a_merge_is_weighted_by_tokens_and_added_where_training_went_on(tmp_path):
    with outer_loop(tmp_path) as running, Island(running.port, "home") as home:
        home.give(_values())
        with Island(running.port, "cloud") as cloud:
            cloud.take()
            before = home.own[0].clone()
            home.own[0] -= 1.0
            home.send(0, tokens=30.0, samples=30)
            home.own[0] -= 0.25  # went on meanwhile
            cloud.own[0] += 1.0
            cloud.send(0, tokens=10.0, samples=10)
            home.await_version(0, 2)
            cloud.await_version(0, 2)
            merged = before - (30 * 1.0 - 10 * 1.0) / 40
            assert torch.allclose(cloud.own[0], merged, atol=1e-6)
            assert torch.allclose(home.own[0], merged - 0.25, atol=1e-6)
            seen = running.await_event(Exchanged)
            assert {each.island: each.weight for each in seen.islands} == pytest.approx({"home": 0.75, "cloud": 0.25})
            assert seen.reason == "all have contributed"


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_hub_and_islands_hold_the_same_bits(tmp_path, codec):
    wanted = Wanted(inner_steps=10, codec=codec)
    with outer_loop(tmp_path) as running, Island(running.port, "home", wanted=wanted) as home:
        home.give(_values())
        with Island(running.port, "cloud", wanted=wanted) as cloud:
            cloud.take()
            for version in (2, 3, 4):
                for seed, island in enumerate((home, cloud)):
                    for fragment, change in enumerate(_values(seed=10 * version + seed)):
                        island.own[fragment] -= 0.1 * change
                        island.send(fragment, codec=codec)
                for island in (home, cloud):
                    for fragment in (0, 1):
                        island.await_version(fragment, version)
            hub = running.service.merging.fragments
            for fragment in (0, 1):
                values = [island.client.talk.values.values[fragment] for island in (home, cloud)]
                assert torch.equal(values[0], values[1])
                assert torch.equal(values[0], hub[fragment].values.values)
                # All that was done is in the merge, so nothing of an island's own is left.
                assert torch.allclose(home.own[fragment], values[0], atol=1e-5)


def test_every_step_in_fp32_with_sgd_equals_exact_synchronisation(tmp_path):
    wanted = Wanted(inner_steps=1, blocking=True, codec="fp32", rate=1.0, momentum=0.0)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(400, 20, generator=generator), torch.randn(400, generator=generator)
    lr, batches, sizes = 0.05, 8, {"home": 30, "cloud": 20}
    exact = torch.zeros(20)

    def gradient(w, rows):
        return x[rows].T @ (x[rows] @ w - y[rows]) / len(rows)

    with outer_loop(tmp_path) as running, Island(running.port, "home", (12, 8), wanted=wanted) as home:
        home.give(list(torch.zeros(20).split((12, 8))))
        with Island(running.port, "cloud", (12, 8), wanted=wanted) as cloud:
            cloud.take()
            for number in range(batches):
                rows = torch.arange(50 * number, 50 * number + 50)
                exact -= lr * gradient(exact, rows)
                for island, own_rows in ((home, rows[:30]), (cloud, rows[30:])):
                    w = torch.cat(island.own)
                    w -= lr * gradient(w, own_rows)
                    island.own = [part.clone() for part in w.split((12, 8))]
                    for fragment in (0, 1):
                        island.send(fragment, tokens=sizes[island.name], samples=sizes[island.name])
                for island in (home, cloud):
                    for fragment in (0, 1):
                        island.await_version(fragment, number + 2)
                for island in (home, cloud):
                    assert float((torch.cat(island.own) - exact).norm() / exact.norm()) < 1e-6


def test_an_island_that_leaves_is_not_waited_for(tmp_path):
    with outer_loop(tmp_path) as running, Island(running.port, "home") as home:
        home.give(_values())
        with Island(running.port, "cloud") as cloud:
            cloud.take()
            cloud.client.say(Detach(reason="done"))
            eventually(lambda: running.service.islands == ("home",))
            home.own[0] -= 1.0
            home.send(0)
            home.await_version(0, 2)
            left = running.await_event(IslandChanged, lambda event: event.change == "left")
            assert left.island == "cloud"


def test_a_quorum_waits_no_longer_than_its_grace(tmp_path):
    # Nobody has measured anything: the grace is the patience.
    with outer_loop(tmp_path, patience_s=0.5) as running, Island(running.port, "home", patience_s=0.5) as home:
        home.give(_values())
        with Island(running.port, "cloud", patience_s=0.5) as cloud:
            cloud.take()
            home.own[0] -= 1.0
            home.send(0)
            home.await_version(0, 2)
            seen = running.await_event(Exchanged)
            assert "waited" in seen.reason
            assert "cloud" in seen.reason


def test_asynchronous_islands_are_merged_one_by_one_for_their_part(tmp_path):
    wanted = Wanted(inner_steps=10, asynchronous=True, codec="fp32", rate=1.0, momentum=0.0, oldest=8)
    with outer_loop(tmp_path) as running, Island(running.port, "home", wanted=wanted) as home:
        home.give(_values())
        with Island(running.port, "cloud", wanted=wanted) as cloud:
            cloud.take()
            before = home.own[0].clone()
            for version in (2, 3, 4):
                home.own[0] -= 1.0
                home.send(0)
                home.await_version(0, version)  # nobody waits for the other one
            assert torch.allclose(home.own[0], before - 1.5, atol=1e-5)  # half of each, for one island of two
            cloud.await_version(0, 4)
            cloud.own[0] += 4.0
            cloud.send(0)
            cloud.await_version(0, 5)
            assert torch.allclose(cloud.own[0], before - 1.5 + 2.0, atol=1e-5)


def test_the_first_islands_words_count_and_others_are_told(tmp_path):
    exact = Wanted(inner_steps=1, blocking=True, codec="fp32", rate=1.0, momentum=0.0)
    with outer_loop(tmp_path) as running, Island(running.port, "home", wanted=exact) as home:
        home.give(_values())
        with Island(running.port, "cloud", wanted=Wanted(inner_steps=50)) as cloud:
            cloud.take()
            tempo = cloud.client.talk.tempo
            assert tempo is not None
            assert (tempo.inner_steps, tempo.blocking, tempo.codec) == (1, True, "fp32")
            seen = running.await_event(IslandChanged, lambda event: event.island == "cloud")
            assert "as the first island's script says" in seen.text


def test_data_of_an_islands_own_counts_by_its_size(tmp_path):
    settings = {"wanted": Wanted(inner_steps=10, codec="fp32", rate=1.0, momentum=0.0), "data": "local"}
    with outer_loop(tmp_path) as running, Island(running.port, "home", dataset=300, **settings) as home:
        home.give(_values())
        with Island(running.port, "cloud", dataset=100, **settings) as cloud:
            cloud.take()
            before = home.own[0].clone()
            home.own[0] -= 1.0
            cloud.own[0] += 3.0
            home.send(0, tokens=8.0, steps=1)
            cloud.send(0, tokens=800.0, steps=1)  # far more samples, of little data
            for island in (home, cloud):
                island.await_version(0, 2)
                assert torch.allclose(island.own[0], before - 0.75 + 0.75, atol=1e-5)
            seen = running.await_event(Exchanged, lambda event: len(event.islands) == 2)
            assert {part.island: part.weight for part in seen.islands} == {"home": 0.75, "cloud": 0.25}
