from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.profile import DeviceProfile, LinkProfile, ModelFacts, Timing
from ragtag.cost.comm import vote_s
from ragtag.cost.problem import Problem, Rank
from ragtag.cost.reduction import exposed_ring_s
from ragtag.plan.rings import Rings

HOSTS = [f"h{index}" for index in range(60)]
ONE = DeviceProfile(name="d", timings=(Timing(samples=1, seconds=1.0),))
FACTS = ModelFacts(name="m", shape_hash="", parameters=1, parameter_bytes=4, gradient_bytes=9 << 20, optimizer_bytes=8)


def joined(latencies_s):
    links = tuple(
        LinkProfile(between=pair, bandwidth_bytes_per_s=1e9, latency_s=latencies_s[index % len(latencies_s)])
        for index, pair in enumerate(combinations_with_replacement(HOSTS, 2))
        if index % 5
    )
    ranks = tuple(Rank(name=host, host=host, price_per_hour=0.0, device=ONE) for host in HOSTS)
    return Problem(ranks=ranks, links=links, model=FACTS, global_batch_size=64)


@given(
    st.lists(st.sampled_from([1e-6, 1e-4, 3e-4, 1e-2]), min_size=1, max_size=9),
    st.lists(st.sampled_from(HOSTS), min_size=1, max_size=90),
)
def test_remembered_costs_are_those_of_the_cost_model(latencies_s, hosts):
    case = joined(latencies_s)
    rings = Rings(case)
    for _ in range(2):
        assert rings.vote_s(tuple(hosts)) == vote_s(hosts, case.link)
        first_s, last_s, _ = exposed_ring_s(case, hosts)
        assert sum(rings.rings_s(tuple(hosts))) == pytest.approx(first_s)
        assert rings.rings_s(tuple(hosts))[-1] == pytest.approx(last_s)
