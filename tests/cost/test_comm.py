from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.profile import LinkProfile
from ragtag.cost.comm import LOOPBACK, all_gather_s, ring_all_reduce_s, send_s, vote_s, zero_s


def link(bandwidth, latency_s):
    return LinkProfile(between=("", ""), bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)


def over(links):
    return lambda host, other: links.get(frozenset((host, other)))


@given(st.integers(2, 9), st.integers(1, 10**9), st.floats(1e3, 1e10), st.floats(0, 0.1))
def test_equal_links_give_the_textbook_formula(num_ranks, num_bytes, bandwidth, latency_s):
    hosts = [f"host{index}" for index in range(num_ranks)]
    seconds = ring_all_reduce_s(num_bytes, hosts, lambda host, other: link(bandwidth, latency_s))
    expected = 2 * (num_ranks - 1) / num_ranks * num_bytes / bandwidth + 2 * (num_ranks - 1) * latency_s
    assert abs(seconds - expected) <= 1e-9 * expected


def test_the_slowest_hop_sets_the_bandwidth_part():
    links = {frozenset("ab"): link(1e9, 0), frozenset("bc"): link(1e6, 0), frozenset("ca"): link(1e9, 0)}
    assert ring_all_reduce_s(3_000_000, "abc", over(links)) == 4.0


def test_hops_that_share_a_link_share_its_bandwidth():
    one = ring_all_reduce_s(4e6, ["a", "a", "b", "b"], over({frozenset("ab"): link(1e6, 0)}), loopback=link(1e12, 0))
    # Interleaved, the ring crosses the link twice in each direction.
    two = ring_all_reduce_s(4e6, ["a", "b", "a", "b"], over({frozenset("ab"): link(1e6, 0)}), loopback=link(1e12, 0))
    assert one == 6.0
    assert two == 12.0


def test_a_rank_alone_sends_nothing():
    assert ring_all_reduce_s(1e9, ["a"], over({})) == 0
    assert vote_s(["a"], over({})) == 0


def test_unknown_links_are_the_loopback_that_was_given():
    assert send_s(1e6, "a", "b", over({}), loopback=link(1e6, 0.5)) == 1.5
    assert send_s(4e9, "a", "b", over({})) == 1 + LOOPBACK.latency_s


def test_zero_1_and_2_cost_an_all_reduce_and_zero_3_half_as_much_again():
    between = over({frozenset(pair): link(1e6, 1e-3) for pair in ("ab", "bc", "ca")})
    reduce_s = ring_all_reduce_s(6e6, "abc", between)
    assert abs(zero_s(1, 6e6, 6e6, "abc", between) - reduce_s) < 1e-9
    assert abs(zero_s(2, 6e6, 6e6, "abc", between) - reduce_s) < 1e-9
    assert abs(zero_s(3, 6e6, 6e6, "abc", between) - 1.5 * reduce_s) < 1e-9
    assert zero_s(3, 6e6, 6e6, "abc", between, micro_batches=4) == 4 * zero_s(3, 6e6, 6e6, "abc", between)


def test_the_vote_waits_for_the_farthest_pair():
    links = {frozenset("ab"): link(1e9, 0.01), frozenset("bc"): link(1e9, 0.2), frozenset("ca"): link(1e9, 0.03)}
    assert vote_s("abc", over(links)) == 0.2
    assert all_gather_s(0, "abc", over(links)) == 0
