import random
from itertools import combinations, combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from ragtag.core.cluster import Cluster, Device, Emulation
from ragtag.core.errors import SettingError
from ragtag.core.profile import Block, DeviceProfile, LinkProfile, Memory, ModelFacts, Profile, Timing
from ragtag.cost.candidate import Candidate, Part
from ragtag.cost.device import largest_micro_batch, time_s
from ragtag.cost.problem import Problem, Rank, assemble
from ragtag.cost.step import predict_on
from ragtag.plan.coarse import MANY_KINDS, coarse
from ragtag.plan.replicated import Solver
from ragtag.plan.search import REPLICATED, Way, search
from ragtag.plan.sharded import zero
from ragtag.plan.verdict import verdicts

MEGABYTE = 1 << 20


def model(gradient_bytes=4 * MEGABYTE, unit=1):
    return ModelFacts(
        name="m",
        shape_hash="",
        parameters=1,
        parameter_bytes=gradient_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=2 * gradient_bytes,
        unit=unit,
    )


def problem(devices, hosts, batch, *, links=(), facts=None, blocks=()):
    ranks = tuple(
        Rank(name=f"d{index}", host=host, price_per_hour=0.0, device=device)
        for index, (device, host) in enumerate(zip(devices, hosts))
    )
    return Problem(ranks=ranks, links=links, model=facts or model(), global_batch_size=batch, blocks=blocks)


def device(per_sample_s, overhead_s=0.0, *, name="d", largest=None, **fields):
    memory = None if largest is None else Memory(fixed_bytes=100, per_sample_bytes=10)
    return DeviceProfile(
        name=name,
        timings=tuple(Timing(samples=size, seconds=overhead_s + size * per_sample_s) for size in (1, 2, 8)),
        capacity_bytes=None if largest is None else 100 + 10 * largest,
        memory=memory,
        **fields,
    )


milliseconds = st.integers(1, 200).map(lambda ms: ms / 1e3)
machines = st.builds(
    lambda per_sample_s, overhead_s, optimizer_s, largest: device(
        per_sample_s, overhead_s, optimizer_s=optimizer_s, largest=largest
    ),
    milliseconds,
    milliseconds,
    milliseconds,
    st.none() | st.integers(1, 6),
)
places = st.lists(st.tuples(machines, st.sampled_from(["a", "b"])), min_size=1, max_size=3)
bandwidths = st.sampled_from([1e6, 2e7, 1e9])


def joined(bandwidth):
    return (LinkProfile(between=("a", "b"), bandwidth_bytes_per_s=bandwidth, latency_s=1e-3),)


def fits(prediction):
    return all((one.memory_bytes or 0) <= (one.capacity_bytes or 1 << 60) for one in prediction.devices)


def brute_force(case, *, own_size):
    """The least step over all subsets, splits and micro-batch sizes, priced by the whole cost model."""
    best = None
    batch = case.global_batch_size
    for number in range(1, len(case.ranks) + 1):
        for subset in combinations(case.ranks, number):
            caps = [largest_micro_batch(rank.device) for rank in subset]
            for shares in product(range(batch + 1), repeat=number):
                if sum(shares) != batch:
                    continue
                most = [min(share, batch if cap is None else cap) for share, cap in zip(shares, caps)]
                if any(share and not size for share, size in zip(shares, most)):
                    continue
                if own_size:
                    sizes = product(*(range(1, max(size, 1) + 1) for size in most))
                else:
                    # A common size binds only those whose share is larger.
                    sizes = (
                        [min(common, max(share, 1)) for share in shares]
                        for common in range(1, batch + 1)
                        if all(min(common, share) <= size for share, size in zip(shares, most))
                    )
                for chosen in sizes:
                    parts = tuple(
                        Part(device=rank.name, samples=share, micro_batch=size)
                        for rank, share, size in zip(subset, shares, chosen)
                    )
                    step_s = predict_on(case, Candidate(name="", layout="replicated", parts=parts)).step_s
                    best = step_s if best is None else min(best, step_s)
    return best


@pytest.mark.parametrize("own_size", [False, True])
@settings(max_examples=25, phases=[Phase.explicit, Phase.generate])
@given(places, st.integers(1, 6), bandwidths, st.sampled_from([1, 4, 9]))
def test_small_cases_are_within_a_percent_of_brute_force(own_size, places, batch, bandwidth, megabytes):
    case = problem(*zip(*places), batch, links=joined(bandwidth), facts=model(megabytes * MEGABYTE))
    found = Solver(case, Way(name="x", own_size=own_size)).best()
    best_s = brute_force(case, own_size=own_size)
    if found is None:
        assert best_s is None
        return
    prediction = predict_on(case, found)
    assert sum(part.samples for part in found.parts) == batch
    assert fits(prediction)
    assert best_s is not None
    assert prediction.step_s <= 1.01 * best_s
    assert prediction.step_s >= best_s * (1 - 1e-9)


def _step_s(solver: Solver, ranks: tuple[int, ...]) -> float:
    seconds = solver.step_s(ranks)
    assert seconds is not None
    return seconds


def _ranks(case, candidate):
    inside = {part.device for part in candidate.parts}
    return tuple(index for index, rank in enumerate(case.ranks) if rank.name in inside)


clusters = st.integers(0, 2**32).map(lambda seed: random_cluster(random.Random(seed)))


def random_cluster(draw):
    """6 to 10 devices of some kinds on hosts in any order, with links of any speed between some of them."""

    def kind():
        largest = draw.choice([None, None, 1, 2, 4, 9])
        return device(
            draw.choice([0.001, 0.005, 0.02, 0.1]),
            draw.choice([0.0, 0.01, 0.1]),
            optimizer_s=draw.choice([0.001, 0.02, 0.2]) * draw.uniform(0.5, 2),
            largest=largest,
            jitter=jitter if even else draw.choice([0.0, 0.05, 0.3]),
        )

    number = draw.randint(6, 10)
    even, jitter = draw.random() < 0.7, draw.choice([0.0, 0.1])
    kinds = [kind() for _ in range(draw.choice([2, 3, number]))]
    num_hosts = draw.choice([2, 3, 4, number])
    hosts = [f"h{draw.randrange(num_hosts)}" for _ in range(number)]
    if draw.random() < 0.7:
        hosts.sort()
    links = tuple(
        LinkProfile(
            between=(f"h{first}", f"h{second}"),
            bandwidth_bytes_per_s=draw.choice([1e6, 1e7, 1e8, 1e9]),
            latency_s=draw.choice([1e-5, 1e-3, 1e-2]),
        )
        for first, second in combinations(range(num_hosts), 2)
        if draw.random() < 0.8
    )
    facts = model(draw.choice([0, 1, 4, 9, 100]) * MEGABYTE)
    devices = [draw.choice(kinds) for _ in range(number)]
    return problem(devices, hosts, draw.choice([5, 12, 24, 64]), links=links, facts=facts)


@settings(max_examples=15, derandomize=True, phases=[Phase.generate])
@given(clusters)
def test_no_other_subset_of_ten_devices_is_a_percent_faster(case):
    """Given who takes part, shares are optimal (`test_no_other_split_is_done_earlier`), so all subsets are tried."""
    found = Solver(case, REPLICATED).best()
    other = Solver(case, REPLICATED)
    ranks = range(len(case.ranks))
    times = [other.step_s(subset) for number in ranks for subset in combinations(ranks, number + 1)]
    best_s = min((seconds for seconds in times if seconds is not None), default=None)
    if found is None:
        assert best_s is None
        return
    assert best_s is not None
    prediction = predict_on(case, found)
    assert fits(prediction)
    assert sum(part.samples for part in found.parts) == case.global_batch_size
    assert prediction.step_s <= 1.01 * best_s
    assert prediction.step_s >= best_s * (1 - 1e-9)


def test_many_small_differences_between_many_hosts_are_found():
    """Beyond what is tried out completely: 16 hosts, of which every second one is behind a slow link."""
    devices = [device(0.01 + 0.001 * index, 0.002) for index in range(16)]
    hosts = [f"h{index}" for index in range(16)]
    slow = set(hosts[1::2])
    links = tuple(
        LinkProfile(between=pair, bandwidth_bytes_per_s=2e6 if slow & {*pair} else 1e9, latency_s=1e-4)
        for pair in combinations(hosts, 2)
    )
    case = problem(devices, hosts, 256, links=links)
    candidate = Solver(case, REPLICATED).best()
    assert [int(part.device[1:]) for part in candidate.parts] == list(range(0, 16, 2))


def test_the_slow_quarter_of_a_large_cluster_is_left_out_where_latency_counts():
    """A ring over n devices has 2 (n - 1) hops, so each slow device costs everybody a hop."""
    devices = [device(0.01 if index % 4 else 0.5, 0.001) for index in range(120)]
    hosts = [f"h{index // 8}" for index in range(120)]
    links = tuple(
        LinkProfile(between=pair, bandwidth_bytes_per_s=1e9, latency_s=2e-3)
        for pair in combinations_with_replacement(dict.fromkeys(hosts), 2)
    )
    case = problem(devices, hosts, 3000, links=links, facts=model(1 * MEGABYTE))
    solver = Solver(case, REPLICATED)
    fast = tuple(index for index in range(120) if index % 4)
    assert (
        _step_s(solver, _ranks(case, solver.best()))
        <= _step_s(solver, fast)
        < 0.99 * _step_s(solver, tuple(range(120)))
    )


def test_a_device_that_cannot_hold_the_model_takes_no_part_even_without_a_share():
    tiny = DeviceProfile(
        name="tiny",
        timings=device(0.01).timings,
        capacity_bytes=90,
        memory=Memory(fixed_bytes=100, per_sample_bytes=10),
    )
    case = problem((device(0.01, largest=8), tiny, device(0.02, largest=8)), "aaa", 12, facts=model(0))
    choice = search(case)
    assert choice.best.candidate.left_out == ("d1",)
    assert "d1: cannot take part" in {verdict.device: verdict.text for verdict in verdicts(case, choice)}["d1"]
    for priced in choice.candidates:
        assert priced.prediction is None or fits(priced.prediction)


@settings(max_examples=12, derandomize=True, phases=[Phase.generate])
@given(st.lists(machines, min_size=5, max_size=9), st.integers(10, 24))
def test_medium_cases_are_within_a_percent_of_a_mixed_integer_program(machines, batch):
    case = problem(machines, ["a"] * len(machines), batch, facts=model(0))
    found = Solver(case, Way(name="x", own_size=True)).best()
    assert found is not None
    step_s = predict_on(case, found).step_s
    # One variable a (device, share, takes part with it), and the time; a device that is left out costs nothing.
    ends = np.array([[0.0] + [_quickest(one, share) for share in range(1, batch + 1)] for one in machines])
    shares = np.tile(np.arange(batch + 1), len(machines))
    columns = ends.size + 1
    one_share = np.zeros((len(machines), columns))
    until = np.zeros((len(machines), columns))
    for row in range(len(machines)):
        one_share[row, row * (batch + 1) : (row + 1) * (batch + 1)] = 1
        until[row, row * (batch + 1) : (row + 1) * (batch + 1)] = ends[row]
        until[row, -1] = -1
    # A share that ends after what the planner found is in no better solution: without it HiGHS takes milliseconds.
    possible = (ends.ravel() <= step_s).astype(float)
    optimum = milp(
        np.eye(columns)[-1],
        integrality=np.append(np.ones(ends.size), 0),
        bounds=Bounds(0, np.append(possible, step_s)),
        constraints=[
            LinearConstraint(one_share, 1, 1),
            LinearConstraint(np.append(shares, 0)[None, :], batch, batch),
            LinearConstraint(until, -np.inf, 0),
        ],
        options={"time_limit": 5.0, "mip_rel_gap": 1e-3},
    )
    # Where the time is up, the proven bound still says how far from the optimum the plan can be at most.
    bound_s = optimum.fun if optimum.success else optimum.mip_dual_bound
    # Latencies of the ring are not in the program: with no bytes to reduce there are none but the vote's.
    assert step_s - 50e-6 <= 1.01 * bound_s + 1e-9
    assert optimum.fun is None or step_s >= optimum.fun * (1 - 2e-3)


def _quickest(one, share):
    cap = largest_micro_batch(one) or share
    return one.optimizer_s + min(time_s(one, share, size) for size in range(1, min(cap, share) + 1))


def test_one_micro_batch_size_for_all_does_not_slow_down_the_devices_with_memory():
    # The tight device has one sample, which is within any size: the other one computes six at once.
    case = problem((device(0.01, 0.1, largest=1), device(0.01, 0.1, largest=6)), "aa", 7, facts=model(0))
    candidate = Solver(case, REPLICATED).best()
    assert [(part.samples, part.micro_batch) for part in candidate.parts] == [(1, 1), (6, 6)]
    assert predict_on(case, candidate).step_s == pytest.approx(0.16, abs=1e-3)


def home(**fields):
    devices = (device(0.01, largest=40), device(0.01, largest=40), device(0.03, largest=4), device(0.1, largest=40))
    return problem(devices, ["desk", "desk", "desk", "sofa"], 64, **fields)


SLOW = (LinkProfile(between=("desk", "sofa"), bandwidth_bytes_per_s=5e6, latency_s=2e-3),)


def test_a_device_behind_a_slow_link_is_left_out_and_the_reason_says_so():
    choice = search(home(links=SLOW))
    assert choice.best.candidate.left_out == ("d3",)
    assert "without d3" in choice.reason
    assert choice.best.runnable
    assert search(home()).best.candidate.left_out == ()


def test_all_layouts_are_priced():
    blocks = tuple(
        Block(name=str(i), forward_s=1.0, backward_s=2.0, parameter_bytes=10, activation_bytes=1, output_bytes=1)
        for i in range(6)
    )
    choice = search(home(links=SLOW, facts=model(20), blocks=blocks))
    layouts = {one.candidate.layout: one for one in choice.candidates if one.candidate is not None}
    assert set(layouts) == {"replicated", "zero-1", "zero-2", "zero-3", "pipeline", "islands"}
    for layout, priced in layouts.items():
        assert priced.runnable, layout
    assert choice.best.candidate.layout == "replicated"
    islands = layouts["islands"]
    assert islands.prediction.sample_efficiency < 1
    assert {part.device for part in islands.candidate.parts if part.island == 1} == {"d3"}


def test_the_plan_is_the_same_every_time():
    assert search(home(links=SLOW)) == search(home(links=SLOW))


def test_a_slow_roomy_device_holds_state_and_computes_nothing():
    # State is 4000 bytes; neither fits alone. The slow one would take seconds for a sample.
    small = DeviceProfile(
        name="fast",
        timings=device(0.01).timings,
        capacity_bytes=1500,
        memory=Memory(fixed_bytes=4000, per_sample_bytes=10),
    )
    roomy = DeviceProfile(
        name="p40",
        timings=device(50.0).timings,
        capacity_bytes=3900,
        memory=Memory(fixed_bytes=4000, per_sample_bytes=10),
    )
    blocks = tuple(
        Block(name=str(i), forward_s=1.0, backward_s=2.0, parameter_bytes=20, activation_bytes=1, output_bytes=1)
        for i in range(50)
    )
    case = problem((small, roomy), ["a", "a"], 8, facts=model(1000), blocks=blocks)
    candidate = zero(case, 3, (0, 1)).candidate
    fast, holder = candidate.parts
    assert (fast.samples, holder.samples) == (8, 0)
    held = [part.state_bytes or 0 for part in (fast, holder)]
    assert sum(held) == 4000
    assert held[1] > held[0]
    assert fits(predict_on(case, candidate))
    choice = search(case)
    assert choice.best.candidate.layout.startswith("zero")
    assert choice.best.runnable


@settings(max_examples=30)
@given(
    st.lists(st.tuples(milliseconds, st.integers(600, 9000)), min_size=1, max_size=5),
    st.integers(1, 40),
    st.sampled_from([1, 2, 3]),
)
def test_sharded_plans_keep_to_every_memory_and_hold_all_state(devices, batch, stage):
    memory = Memory(fixed_bytes=4100, per_sample_bytes=30)
    case = problem(
        [
            DeviceProfile(name="d", timings=device(s).timings, capacity_bytes=capacity, memory=memory)
            for s, capacity in devices
        ],
        ["a"] * len(devices),
        batch,
        facts=model(1000),
    )
    slices = zero(case, stage, tuple(range(len(devices))))
    if slices.candidate is None:
        assert "too few" in slices.why_not or "not even one sample" in slices.why_not
        return
    sharded = {1: 2000, 2: 3000, 3: 4000}[stage]
    assert sum(part.state_bytes or 0 for part in slices.candidate.parts) == sharded
    assert sum(part.samples for part in slices.candidate.parts) == batch
    assert fits(predict_on(case, slices.candidate))


def test_what_fits_nowhere_says_which_constraint_and_by_how_much():
    tight = DeviceProfile(
        name="d", timings=device(1).timings, capacity_bytes=1000, memory=Memory(fixed_bytes=4000, per_sample_bytes=500)
    )
    with pytest.raises(SettingError, match=r"needs 4.5 kB.*'d0', has 1 kB: 3.5 kB too few"):
        search(problem((tight,), ("a",), 4, facts=model(100)))


def test_units_are_never_cut():
    case = problem((device(0.01), device(0.03)), ("a", "a"), 30, facts=model(0, unit=8))
    candidate = search(case).best.candidate
    shares = [part.samples for part in candidate.parts]
    assert sum(shares) == 30
    assert shares[0] % 8 == 0
    assert {part.micro_batch for part in candidate.parts} == {8}


def test_many_unequal_devices_are_planned_with_a_bounded_number_of_trials():
    devices = [device(0.01 * (1 + index / 1000)) for index in range(600)]
    case = problem(devices, [f"h{index // 30}" for index in range(600)], 6000)
    solver = Solver(case, REPLICATED)
    candidate = solver.best()
    assert sum(part.samples for part in candidate.parts) == 6000
    # The search may cost 250,000 and 400 a device, and the last trial what it needs; 600 kinds cost 24,600 a time.
    assert solver._coarse.cost <= 250_000 + 400 * 600 + 50_000
    assert solver.cost <= 50_000
    alike = Solver(case, REPLICATED)
    assert _step_s(solver, tuple(range(600))) >= _step_s(alike, _ranks(case, candidate))


def test_taking_nearly_equal_devices_as_equal_costs_less_than_a_percent(monkeypatch):
    draw = random.Random(5)
    devices = [
        device(
            0.01 * (3 if index % 3 else 1) * draw.gauss(1, 0.03), 0.002, optimizer_s=0.01, largest=draw.choice([4, 9])
        )
        for index in range(130)
    ]
    hosts = [f"h{index // 10}" for index in range(130)]
    links = tuple(
        LinkProfile(between=pair, bandwidth_bytes_per_s=1e9, latency_s=1e-3)
        for pair in combinations_with_replacement(dict.fromkeys(hosts), 2)
    )
    case = problem(devices, hosts, 2000, links=links)
    rough = coarse(case)
    assert len({id(one) for one in rough.alike}) <= MANY_KINDS < len({id(one) for one in case.alike})
    for one, other in zip(case.alike, rough.alike):
        assert other.timings[-1].seconds == pytest.approx(one.timings[-1].seconds, rel=0.1)
    roughly = Solver(case, REPLICATED).best()
    monkeypatch.setattr("ragtag.plan.coarse.MANY_KINDS", 1000)
    exactly = Solver(case, REPLICATED).best()
    assert predict_on(case, roughly).step_s <= 1.01 * predict_on(case, exactly).step_s


def test_a_profile_and_a_cluster_are_enough():
    cluster = Cluster(devices=(Device(name="a"), Device(name="b")), emulation=Emulation(sample_s=1.0))
    measured = Profile(model=model(), global_batch_size=9, devices=(device(0.1, name="a"), device(0.2, name="b")))
    shares = [part.samples for part in search(assemble(measured, cluster)).best.candidate.parts]
    assert shares == [6, 3]
