"""When a merge is closed, how often islands exchange, what the guard does: the same numbers, the same decisions."""

import pytest
import torch

from ragtag.outer import rounds
from ragtag.outer.codec import WorthlessDelta
from ragtag.outer.protocol import Beat, Reading, Tempo, Wanted
from ragtag.outer.tempo import Tuner, shares_for, slowest_exchange
from ragtag.outer.values import FragmentValues
from ragtag.runtime.islands.cut import Cut
from ragtag.runtime.islands.pace import Pace
from ragtag.runtime.islands.sampling import IslandSampler
from ragtag.watch.events import Event, Guarded, Retuned

THREE = ("a", "b", "c")


def closed(round_, present=THREE, now_s=0.0, **settings):
    about = {"inner_steps": 10, "inner_s": 0.5, "patience_s": 30.0, **settings}
    return rounds.why_closed(round_, present, now_s=now_s, **about)


def test_a_round_closes_with_all_or_with_a_quorum_and_grace():
    first = rounds.contributed(None, "a", 1.0, present=3, now_s=100.0)
    assert not closed(first, now_s=500.0)  # one of three is no quorum, however long it takes
    second = rounds.contributed(first, "b", 1.0, present=3, now_s=200.0)
    assert not closed(second, now_s=200.9)
    assert "a quorum has waited 1 s for c" in closed(second, now_s=201.0)  # 0.2 * 10 * 0.5
    assert closed(second, present=("a", "b"), now_s=200.0) == "all have contributed"
    third = rounds.contributed(second, "c", 1.0, present=3, now_s=200.1)
    assert closed(third, now_s=200.1) == "all have contributed"


def test_the_grace_is_never_longer_than_the_patience_but_for_the_last_round():
    alone = rounds.contributed(None, "a", 1.0, present=2, now_s=0.0)
    assert closed(alone, present=("a", "b"), now_s=3.0, inner_s=0.0, patience_s=3.0)
    assert closed(alone, present=("a", "b"), now_s=3.0, inner_s=100.0, patience_s=3.0)
    last = rounds.contributed(None, "a", 1.0, present=2, now_s=0.0, final=True)
    assert not closed(last, present=("a", "b"), now_s=29.9, patience_s=3.0)
    assert closed(last, present=("a", "b"), now_s=30.0, patience_s=3.0)


def beat(inner_s: float, outer_s: float, samples_per_s: float = 10.0) -> Beat:
    return Beat(step=1, inner_s=inner_s, outer_s=outer_s, samples_per_s=samples_per_s, training=True)


def test_inner_steps_hide_the_slowest_islands_exchange():
    found = slowest_exchange({"a": beat(0.5, 1.0), "b": beat(0.5, 20.0)})
    assert found is not None
    assert found[0] == 50  # ceil(20 / (0.8 * 0.5))
    assert "b exchanges in 20 s" in found[1]
    found = slowest_exchange({"a": beat(0.5, 1.0)})
    assert found is not None
    assert found[0] == 10
    assert slowest_exchange({"a": beat(0.5, 0.0)}) is None


def test_the_tempo_follows_a_bandwidth_that_drops_and_a_speed_that_halves():
    told: list[Event] = []
    tuner = Tuner(Wanted(), None)
    tuner.measured({"a": beat(0.5, 3.0), "b": beat(0.5, 6.0)}, told.append)
    assert tuner.take_news().inner_steps == 15
    tuner.measured({"a": beat(0.5, 3.0), "b": beat(0.5, 6.3)}, told.append)
    assert tuner.take_news() is None  # within the dead zone
    tuner.measured({"a": beat(0.5, 3.0), "b": beat(0.5, 60.0)}, told.append)
    assert tuner.take_news().inner_steps == 150
    tuner.measured({"a": beat(0.5, 3.0), "b": beat(0.5, 6.0)}, told.append)
    assert tuner.take_news().inner_steps == 15
    tuner.measured({"a": beat(0.5, 3.0, 10.0), "b": beat(1.0, 6.0, 5.0)}, told.append)
    news = tuner.take_news()
    assert dict(news.shares) == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert all(isinstance(each, Retuned) and each.reason for each in told)


def test_shares_are_in_proportion_to_speed_once_all_are_known():
    assert shares_for({"a": beat(1, 1, 30.0), "b": beat(1, 1, 10.0)}) == (("a", 0.75), ("b", 0.25))
    assert shares_for({"a": beat(1, 1, 30.0), "b": beat(1, 1, 0.0)}) == ()


def reading(rise: float, noise: float = 0.1) -> Reading:
    return Reading(fragment=0, version=2, before=2.0, after=2.0 + rise, noise=noise)


def test_the_guard_halves_steps_then_the_rate_then_asks_for_exact_synchronisation():
    told: list[Event] = []
    tuner = Tuner(Wanted(), Tempo(inner_steps=30))
    seen = []
    for _ in range(6):
        for _ in range(8):
            tuner.read("a", reading(0.5), told.append)
        news = tuner.take_news()
        seen.append((news.inner_steps, news.rate))
    assert seen[:4] == [(15, 0.7), (10, 0.7), (10, 0.35), (10, 0.35)]
    actions = [each.action for each in told if isinstance(each, Guarded) and each.action]
    assert "H is halved to 15" in actions[0]
    assert "rate is halved to 0.35" in actions[2]
    assert 'mode="exact"' in actions[3]
    # What is measured does not take back what the guard has done.
    tuner.measured({"a": beat(0.5, 60.0)}, told.append)
    assert tuner.tempo.inner_steps == 10


@pytest.mark.parametrize("rise", [-0.5, 0.0, 0.1])
def test_the_guard_leaves_alone_what_is_noise(rise):
    told: list[Event] = []
    tuner = Tuner(Wanted(), Tempo(inner_steps=30))
    for number in range(40):
        tuner.read("a", reading(rise if number % 2 else -rise), told.append)
    tuner.read("a", reading(float("nan")), told.append)
    assert tuner.take_news() is None
    assert not any(each.action for each in told if isinstance(each, Guarded))


def test_late_contributions_count_half_a_round():
    values = FragmentValues(torch.zeros(4), version=5)
    values.add(torch.ones(4), tokens=10.0, steps=1, base=5)
    values.add(torch.full((4,), -1.0), tokens=10.0, steps=1, base=4)
    values.add(torch.full((4,), 3.0), tokens=10.0, steps=1, base=3)
    with pytest.raises(WorthlessDelta, match="older than 2 rounds"):
        values.add(torch.ones(4), tokens=10.0, steps=1, base=2)
    values.close(rate=1.0, momentum=0.0, codec="fp32")
    mean = (1.0 - 0.5 + 3 * 0.25) / 1.75
    assert torch.allclose(values.values, torch.full((4,), -mean))


def test_local_data_is_weighted_by_its_size_whatever_steps_were_taken_over_how_many_samples():
    # FedNova: data of equal size; one island is faster, and has taken four times the steps, with twice the batch.
    values = FragmentValues(torch.zeros(2))
    values.add(torch.tensor([4.0, 0.0]), tokens=64.0, steps=4, base=1, pinned=100)
    values.add(torch.tensor([0.0, 1.0]), tokens=8.0, steps=1, base=1, pinned=100)
    values.close(rate=1.0, momentum=0.0, codec="fp32")
    assert torch.allclose(values.values, -torch.tensor([1.25, 1.25]))  # tau_eff = 2.5, directions alike
    values = FragmentValues(torch.zeros(2))
    values.add(torch.tensor([4.0, 0.0]), tokens=64.0, steps=4, base=1, pinned=300)
    values.add(torch.tensor([0.0, 1.0]), tokens=8.0, steps=1, base=1, pinned=100)
    values.close(rate=1.0, momentum=0.0, codec="fp32")
    assert torch.allclose(values.values, -3.25 * torch.tensor([0.75, 0.25]))


def test_momentum_is_nesterovs():
    values = FragmentValues(torch.zeros(1))
    expected, m = 0.0, 0.0
    for _ in range(3):
        values.add(torch.ones(1), tokens=1.0, steps=1, base=values.version)
        values.close(rate=0.7, momentum=0.5, codec="fp32")
        m = 0.5 * m + 1.0
        expected -= 0.7 * (1.0 + 0.5 * m)
    assert float(values.values) == pytest.approx(expected)


@pytest.mark.parametrize("num_fragments", [1, 3, 4, 1000])
def test_fragments_hold_every_number_once(num_fragments):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3, bias=False))
    model[1].weight = torch.nn.Parameter(torch.randn(5, 3).T)  # not contiguous
    cut = Cut(model, num_fragments)
    before = [each.detach().clone() for each in model.parameters()]
    assert sum(cut.numel) == sum(each.numel() for each in before)
    assert max(cut.numel) - min(cut.numel) <= max(4, sum(cut.numel) // cut.num_fragments // 10 + 4)
    taken = [cut.take(fragment) for fragment in range(cut.num_fragments)]
    assert sorted(torch.cat(taken).tolist()) == sorted(torch.cat([each.reshape(-1) for each in before]).tolist())
    for fragment, numbers in enumerate(taken):
        cut.add(fragment, torch.ones_like(numbers))
    assert all(torch.allclose(now, then + 1) for now, then in zip(model.parameters(), before))
    for fragment, numbers in enumerate(taken):
        cut.put(fragment, numbers)
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before))
    assert cut.hash == Cut(model, num_fragments).hash


def test_fragments_are_sent_in_turn_and_early_where_another_island_was_first():
    pace, versions = Pace(4, 100, 20), dict.fromkeys(range(4), 1)
    sent = {}
    for committed in range(100, 141):
        for fragment in pace.due(committed, 20, opened={}, versions=versions):
            sent.setdefault(fragment, []).append(committed)
            pace.sent(fragment, committed)
    assert sent == {0: [105, 125], 1: [110, 130], 2: [115, 135], 3: [120, 140]}
    assert pace.due(134, 20, opened={0: 1}, versions=versions) == []
    assert pace.due(135, 20, opened={0: 1}, versions=versions) == [0]  # 10 steps of 20
    assert pace.due(135, 20, opened={0: 2}, versions=versions) == []  # of a version that is not here yet


def test_every_step_everything_where_inner_steps_is_one():
    pace = Pace(3, 10, 1)
    assert sorted(pace.due(11, 1, opened={}, versions={})) == [0, 1, 2]


def test_samples_come_once_an_epoch_whatever_the_batch_becomes():
    sampler = IslandSampler(
        dataset_size=50, global_batch_size=8, seed=1, shuffle=True, whole_batch_size=16, after=0, position=0
    )
    seen: list[tuple[int, int]] = []
    step = 0
    for size in (8, 5, 16, 3):
        sampler = sampler.resized(step, size)
        for step in range(step + 1, step + 8):  # noqa: B020
            batch = sampler.batch(step)
            seen += [(batch.epoch, index) for index in sampler.indices(step, 0, batch.size)]
    whole = max(epoch for epoch, _ in seen)
    for epoch in range(whole):
        assert sorted(index for each, index in seen if each == epoch) == list(range(50))
    assert len(set(seen)) == len(seen)
