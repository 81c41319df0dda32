"""Exact, islands or without a site: by time to quality, and exact wherever that costs little."""

import json
import math

import msgspec
import pytest
from typer.testing import CliRunner

from ragtag.cli.launch_plan import planned_run
from ragtag.cli.main import app
from ragtag.core.errors import SettingError
from ragtag.core.inner_steps import inner_steps_for
from ragtag.core.profile import DeviceProfile, LinkProfile, ModelFacts, Timing
from ragtag.cost.outer import INT4_PART, exchange_s, exposed_s, progress
from ragtag.cost.problem import Problem, Rank
from ragtag.plan.file import load_plan, plan_file, save_plan
from ragtag.plan.loss_fall import loss_fall
from ragtag.plan.search import cost_of_exact, search
from ragtag.watch.events import Step

SITES = """
[emulate]
sample_ms = {sample_ms}
[[device]]
name = "a"
count = 2
host = "home"
[[device]]
name = "b"
count = 2
speed = 0.5
host = "cloud"
[[link]]
between = ["home", "cloud"]
bandwidth = "{bandwidth}"
latency = "10ms"
"""


def sites(bandwidth: float, *, hosts="aabb", seconds=(0.1, 0.1, 0.2, 0.2), num_bytes=40_000_000, **fields) -> Problem:
    ranks = tuple(
        Rank(
            name=f"d{number}",
            host=host,
            price_per_hour=0.0,
            device=DeviceProfile(
                name=f"d{number}", timings=tuple(Timing(samples=size, seconds=size * each) for size in (1, 2, 8))
            ),
        )
        for number, (host, each) in enumerate(zip(hosts, seconds))
    )
    names = sorted(set(hosts))
    links = tuple(
        LinkProfile(between=(first, second), bandwidth_bytes_per_s=bandwidth, latency_s=1e-3)
        for first in names
        for second in names
        if first < second
    )
    facts = ModelFacts(
        name="m",
        shape_hash="",
        parameters=1,
        parameter_bytes=num_bytes,
        gradient_bytes=num_bytes,
        optimizer_bytes=2 * num_bytes,
        unit=1,
    )
    return Problem(ranks=ranks, links=links, model=facts, global_batch_size=32, **fields)


def chosen(problem: Problem):
    return search(problem).best.candidate


def test_the_slower_the_link_the_further_from_exact_synchronisation():
    fast, slow, slowest = (search(sites(each)) for each in (1e9, 5e6, 2e4))
    assert fast.best.candidate.layout == "replicated"
    assert not fast.best.candidate.left_out
    assert slow.best.candidate.layout == "islands"
    assert not slow.best.candidate.asynchronous
    assert {part.island for part in slow.best.candidate.parts} == {0, 1}
    assert "exchange in" in slow.reason
    assert "a sample counts 0.9" in slow.reason
    # So slow that the steps it takes to hide an exchange cost more progress than the other site gives.
    assert slowest.best.candidate.layout == "replicated"
    assert set(slowest.best.candidate.left_out) == {"d2", "d3"}


def test_exact_synchronisation_is_kept_wherever_it_costs_little():
    for bandwidth in (2e7, 5e7, 1e8, 2e8, 4e8, 8e8):
        choice = search(sites(bandwidth))
        exact = max((one for one in choice.candidates if not one.has_outer_loop), key=lambda one: one.rate)
        outer = next(one for one in choice.candidates if one.has_outer_loop)
        assert choice.best.has_outer_loop == (outer.rate > exact.rate and cost_of_exact(exact, outer) >= 0.15)


def test_what_was_not_chosen_is_told_with_numbers():
    # Links that cost a little, and islands of which a fit says that they lose nothing at all.
    choice = search(sites(1.5e8, loss_fall=1e9))
    assert choice.best.candidate.layout == "replicated"
    assert "exact synchronisation costs" in choice.reason
    assert "below 15%" in choice.reason


@pytest.mark.parametrize(
    ("mode", "layout", "asynchronous"),
    [
        ("exact", "replicated", False),
        ("islands", "islands", False),
        ("async", "islands", True),
    ],
)
def test_a_mode_pins_the_choice(mode, layout, asynchronous):
    for bandwidth in (5e6, 1e9):
        choice = search(sites(bandwidth, mode=mode))
        assert choice.best.candidate.layout == layout
        assert choice.best.candidate.asynchronous == asynchronous
        assert mode in choice.reason


def test_islands_on_one_host_are_refused():
    with pytest.raises(SettingError, match="all devices are on one host"):
        search(sites(1e9, hosts="aaaa", mode="islands"))


def test_an_island_of_three_is_left_out_where_it_costs_more_than_it_gives():
    problem = sites(5e6, hosts="aabbc", seconds=(0.1, 0.1, 0.1, 0.1, 3.0))
    assert chosen(problem).left_out == ("d4",)
    assert len({part.island for part in chosen(problem).parts}) == 2


def test_an_exchange_goes_there_and_back_over_the_slowest_way():
    links = {
        frozenset("ab"): LinkProfile(between=("a", "b"), bandwidth_bytes_per_s=1e6, latency_s=0.01),
        frozenset("ac"): LinkProfile(between=("a", "c"), bandwidth_bytes_per_s=5e5, latency_s=0.0),
    }
    link = lambda one, other: links.get(frozenset((one, other)))  # noqa: E731
    assert exchange_s(1e6, "ab", link) == pytest.approx(2 * (1 + 4 * 0.01))
    assert exchange_s(1e6, "abc", link) == pytest.approx(4.0)
    assert exchange_s(1e6, "a", link) == 0.0
    assert pytest.approx(132 / 1024) == INT4_PART
    assert exposed_s(10.0, 100, 1.0) == 0.0
    assert exposed_s(100.0, 100, 1.0) == pytest.approx(0.2)


def test_progress_falls_with_islands_and_steps_and_less_for_large_models():
    def at(num_parameters=1e6, num_islands=2, inner_steps=25, loss_fall=0.042):
        return progress(num_parameters, num_islands, inner_steps, loss_fall)

    assert at(num_islands=1) == 1.0
    assert at() == pytest.approx(math.exp(-(0.0036 + 5e-4) / 0.042))
    assert at(inner_steps=100) < at()
    assert at(num_islands=8) < at()
    assert at(1e10) > at(1e6)
    assert at(loss_fall=0.1) > at()
    assert inner_steps_for(1.0, 10.0) == 10
    assert inner_steps_for(20.0, 0.5) == 50


def test_how_a_loss_falls_is_read_from_a_run():
    samples = [16.0 * (step + 1) for step in range(300)]
    losses = [3.0 - 0.2 * math.log(each) for each in samples]
    later = losses[100:]
    assert loss_fall(samples, losses) == pytest.approx(0.2 / (sum(later) / len(later)), rel=1e-6)
    with pytest.raises(SettingError, match="does not fall"):
        loss_fall(samples, losses[::-1])
    with pytest.raises(SettingError, match="too few"):
        loss_fall(samples[:10], losses[:10])


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def planned(tmp_path):
    cluster, output = tmp_path / "sites.toml", tmp_path / "plan.json"
    cluster.write_text(SITES.format(sample_ms=100, bandwidth="20Mbit/s"))
    result = run("plan", cluster, "--batch", 32, "--gradient", "40MB", "--output", output)
    assert result.exit_code == 0, result.output
    assert "at each site" in result.output
    return output


def test_each_site_starts_its_own_island_of_a_plan(planned):
    plan = load_plan(planned)
    assert {name: [each.name for each in devices] for name, devices in plan.islands.items()} == {
        "home": ["a-0", "a-1"],
        "cloud": ["b-0", "b-1"],
    }
    for here in ("home", "cloud"):
        site = planned_run(planned, num_workers=None, emulate=None, environ={}, here=here)
        assert (site.island, site.num_workers, site.mode, site.shares) == (here, 2, "islands", ())
    site = planned_run(planned, num_workers=None, emulate=None, environ={}, island="cloud", here="elsewhere")
    assert site.island == "cloud"


def test_a_host_that_is_no_site_of_the_plan_is_told_which_there_are(planned):
    with pytest.raises(SettingError, match=r"'elsewhere', is in no island of the plan .*home \(a-0, a-1\), cloud"):
        planned_run(planned, num_workers=None, emulate=None, environ={}, here="elsewhere")
    with pytest.raises(SettingError, match="--island moon is in no island"):
        planned_run(planned, num_workers=None, emulate=None, environ={}, island="moon", here="home")
    with pytest.raises(SettingError, match="--local 5"):
        planned_run(planned, num_workers=5, emulate=None, environ={}, here="home")


def test_another_host_of_a_site_joins_the_first_one(tmp_path):
    problem = sites(5e6, hosts="aabc", seconds=(0.1, 0.1, 0.1, 0.1))
    fast = LinkProfile(between=("b", "c"), bandwidth_bytes_per_s=1e10, latency_s=1e-5)
    links = tuple(fast if set(link.between) == {"b", "c"} else link for link in problem.links)
    problem = msgspec.structs.replace(problem, links=links, mode="islands")
    path = tmp_path / "plan.json"
    save_plan(plan_file(problem, search(problem)), path)
    assert list(load_plan(path).islands) == ["a", "b"]
    with pytest.raises(SettingError, match=r"'c' belongs to the island b of the plan .* started on 'b'"):
        planned_run(path, num_workers=None, emulate=None, environ={}, here="c")
    assert planned_run(path, num_workers=None, emulate=None, environ={}, here="b").num_workers == 1


def test_the_verb_pins_modes_and_reads_runs(tmp_path):
    cluster, log = tmp_path / "sites.toml", tmp_path / "log.jsonl"
    cluster.write_text(SITES.format(sample_ms=100, bandwidth="20Mbit/s"))
    words = ("plan", cluster, "--batch", 32, "--gradient", "40MB", "--json")
    first = json.loads(run(*words).output)
    assert first["chosen"].startswith("2 islands")
    times = {each["name"]: each["time_to_quality"] for each in first["candidates"]}
    assert times[first["chosen"]] == 1.0
    assert times["replicated, all devices"] > 2
    exact = json.loads(run(*words, "--mode", "exact").output)
    assert "island" not in exact["chosen"]
    steps = [Step(number=n, loss=3.0 - 0.3 * math.log(n), samples=32) for n in range(1, 200)]
    log.write_bytes(b"\n".join(map(msgspec.json.encode, steps)))
    second = json.loads(run(*words, "--from-run", tmp_path).output)
    assert _islands(second)["prediction"]["sample_efficiency"] > _islands(first)["prediction"]["sample_efficiency"]
    for wrong in (("--mode", "fast"), ("--from-run", tmp_path / "nothing")):
        assert isinstance(run(*words, *wrong).exception, SettingError)


def _islands(tree):
    return next(each for each in tree["candidates"] if each["name"] == tree["chosen"])
