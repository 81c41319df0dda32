"""Rounds on a virtual clock, by the very code of a run: what links and speeds do, and what islands make of it."""

import random

import pytest
import torch

import ragtag
from ragtag.watch.events import Exchanged, Guarded, IslandChanged, Retuned
from tests.outer_service.simulated import Link, Site, World, weighed


@pytest.fixture
def world(tmp_path):
    with_files = World(tmp_path)
    yield with_files
    with_files.store.close()


def ended(*sites: Site):
    return lambda: all(site.finished for site in sites)


def after_step(site: Site, step: int):
    return lambda: site.done.steps >= step


def equal(*sites: Site) -> bool:
    first = sites[0].values
    return all(torch.equal(mine, others) for site in sites[1:] for mine, others in zip(first, site.values))


def rounds_since(world: World, at: float) -> int:
    """Rounds of the first fragment since then."""
    return len([event for event in world.told(Exchanged, at) if event.fragment == 0])


def test_two_sites_of_unequal_speed_take_equally_many_steps_and_end_with_the_same_bits(world):
    home, cloud = (
        Site(world, "home", speed=40, link=Link(20e3), total=300),
        Site(world, "cloud", speed=13, link=Link(20e3), total=300),
    )
    world.run(ended(home, cloud))
    assert equal(home, cloud)
    assert home.done.steps == cloud.done.steps == 300
    assert home.done.samples / cloud.done.samples == pytest.approx(40 / 13, rel=0.08)  # equal to begin with
    # Every sample is in a merge, with its weight.
    assert weighed(world, "home") == home.done.samples
    assert weighed(world, "cloud") == cloud.done.samples
    # Nobody trains longer than 0.8 H before it is asked, nor waits for the other: rounds are as often as H says.
    assert len(world.told(Exchanged)) >= 4 * 0.8 * 300 / world.told(Retuned)[-1].inner_steps


def test_a_link_that_is_ten_times_slower_makes_rounds_longer_within_three_of_them(world):
    links = Link(4e3), Link(4e3)
    home, cloud = (Site(world, name, speed=40, link=link, total=900) for name, link in zip(("home", "cloud"), links))
    world.run(after_step(home, 300))
    before = world.told(Retuned)[-1].inner_steps
    for link in links:
        link.bytes_per_s /= 10
    dropped = world.now
    world.run(lambda: rounds_since(world, dropped) >= 3)
    assert world.told(Retuned)[-1].inner_steps > 3 * before
    world.run(ended(home, cloud))
    last = world.told(Retuned)[-1]
    assert last.inner_steps > 3 * before
    assert "exchange" in last.reason
    # Training never waits for the link: all time is in steps, but for the last round.
    assert home.leader.waited_s == cloud.leader.waited_s == 0.0
    # And the link keeps pace again: once H has followed, no delta is late.
    followed = world.times(Retuned)[-1] + last.inner_steps * 1.6
    parts = [part for event in world.told(Exchanged, followed) for part in event.islands]
    assert not [part for part in parts if part.age and part.sent_bytes < part.plain_bytes]  # the last ones are fp32
    assert equal(home, cloud)


def test_a_site_that_becomes_half_as_fast_has_a_smaller_part_within_three_rounds(world):
    home, cloud = (Site(world, name, speed=40, link=Link(20e3), total=600) for name in ("home", "cloud"))
    world.run(after_step(home, 200))
    assert cloud.leader.batch_now == 32
    cloud.speed /= 2
    slower = world.now
    world.run(lambda: rounds_since(world, slower) >= 3)
    assert cloud.leader.batch_now <= 24
    world.run(ended(home, cloud))
    assert home.leader.waited_s == cloud.leader.waited_s == 0.0
    assert cloud.leader.batch_now == 21  # of 64
    assert home.leader.batch_now == 43
    # The longest that a merge waits for the slower site is little of the time between two of them.
    settled = [event.took_s for event in world.told(Exchanged, slower + 60.0)]
    between_s = world.told(Retuned)[-1].inner_steps * 64 / 60
    assert max(settled[:-4]) <= 0.2 * between_s + 1.0
    assert equal(home, cloud)


def test_a_site_vanishes_for_three_rounds_and_nobody_waits_for_it(world):
    home, cloud = (Site(world, name, speed=40, link=Link(20e3), total=500) for name in ("home", "cloud"))
    world.run(after_step(home, 150))
    cloud.vanish()
    gone = world.now
    world.run(lambda: rounds_since(world, gone) >= 3)
    steps = world.told(Retuned)[-1].inner_steps
    assert world.now - gone <= 5 * steps * home.leader.batch_now / home.speed
    cloud.connect()
    world.run(ended(home, cloud))
    assert equal(home, cloud)
    changes = [(event.island, event.change) for event in world.told(IslandChanged)]
    assert ("cloud", "lost") in changes
    assert changes.count(("cloud", "attached")) == 2
    # What it did on its own counts once it is back, late or in the next delta; only its weight falls with age.
    assert weighed(world, "cloud") == cloud.done.samples
    assert weighed(world, "home") == home.done.samples


def test_a_link_that_stalls_for_a_minute_holds_merges_up_no_longer_than_the_grace(world):
    sites = [Site(world, name, speed=40, link=Link(20e3), total=500, batch=96) for name in ("a", "b", "c")]
    world.run(after_step(sites[0], 150))
    sites[2].link.stalled_until = world.now + 60.0
    began = world.now
    world.run(ended(*sites))
    steps, inner_s = world.told(Retuned)[-1].inner_steps, 0.8
    during = [event for at, event in world.events if isinstance(event, Exchanged) and began < at < began + 60.0]
    assert during
    assert all(event.took_s <= 0.2 * steps * inner_s + 4.0 for event in during)
    assert any(event.reason.endswith("for c") for event in during)
    assert equal(*sites)


def test_the_guard_acts_where_merging_hurts_and_names_what_it_did(world):
    # An outer step of twenty times the difference overshoots, again and again.
    config = ragtag.Config(inner_steps=20, patience_s=30.0)
    sites = [
        Site(world, name, speed=640, link=Link(1e6), total=900, drift=0.01, rate=20.0, config=config) for name in "ab"
    ]
    world.run(ended(*sites), limit_s=1e6)
    actions = [event.action for event in world.told(Guarded) if event.action]
    assert "H is halved to 10" in actions[0]
    assert "standard errors" in actions[0]
    assert any("outer learning rate is halved" in each for each in actions)
    assert world.told(Retuned)[-1].inner_steps == 10
    assert equal(*sites)


def test_the_guard_leaves_noise_alone(world):
    sites = [Site(world, name, speed=640, link=Link(1e6), total=1200, drift=0.0005, noise=0.3) for name in ("a", "b")]
    world.run(ended(*sites))
    readings = world.told(Guarded)
    assert len(readings) > 100
    assert not [event.action for event in readings if event.action]


def test_sites_that_are_out_of_phase_come_together_within_a_round(world):
    first = Site(world, "first", speed=40, link=Link(20e3), total=600)
    world.run(after_step(first, 20))
    others = [Site(world, name, speed=40, link=Link(20e3), total=600) for name in ("second", "third")]
    world.run(lambda: all(site.done.steps > 0 for site in others))
    came = world.now
    world.run(ended(first, *others))
    rounds = [event for event in world.told(Exchanged, came) if event.fragment == 0]
    assert all(len(event.islands) == 3 for event in rounds[2:-4])
    assert equal(first, *others)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_of_sixteen_sites_five_come_and_go_and_nothing_is_lost(world, seed):
    luck = random.Random(seed)
    sites = [
        Site(world, f"s{number}", speed=luck.choice([10, 20, 40]), link=Link(luck.choice([20e3, 50e3])), total=240)
        for number in range(16)
    ]
    restless = sites[11:]

    def turn(site: Site) -> None:
        if site.finished or site.done.steps >= site.total:
            return
        if site.session is None:
            site.connect()
        elif site.client.talk.open and site.client.talk.values.begun:
            site.vanish()
        world.after(luck.uniform(5.0, 40.0), lambda: turn(site))

    for site in restless:
        world.after(luck.uniform(30.0, 60.0), lambda site=site: turn(site))

    def go_on() -> bool:
        for site in restless:
            if site.session is None and site.done.steps >= site.total:
                site.connect()
        return all(site.finished for site in sites)

    world.run(go_on, limit_s=5e3)
    assert equal(*sites)
    assert torch.isfinite(sites[0].values[0]).all()
    for site in sites:
        assert weighed(world, site.name) == site.done.samples
    assert sites[0].loss() < 8.0 / 4  # it was 8
