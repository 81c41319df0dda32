"""Whose a slow link is. Link r of a ring leads from rank r - 1 to rank r."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.control.blame_excess import Excess
from ragtag.control.blame_links import RingLinks

FOUR = ("a", "b", "c", "d")


def links_of(*slow: float, steps: int = 6) -> list[Excess]:
    """By link, how many standard deviations it was beyond what was expected, in each of the newest steps."""
    links = [Excess(bursts=True) for _ in slow]
    for link, beyond in zip(links, slow):
        for _ in range(steps):
            link.beyond.add(beyond)
    return links


def named(hosts, *slow: float, steps: int = 6):
    found = {link for link, beyond in enumerate(slow) if beyond > 4}
    return RingLinks(hosts).slow(found, links_of(*slow, steps=steps))


def test_the_machine_all_of_whose_links_are_slow():
    assert named(FOUR, 0, 0, 20, 20) == {2: (2, 3)}
    assert named(FOUR, 20, 20, 0, 0) == {0: (0, 1)}
    assert named(FOUR, 20, 0, 0, 20) == {3: (0, 3)}


def test_of_two_machines_that_share_a_link_the_one_whose_links_are_the_slowest():
    assert named(FOUR, 0, 30, 30, 6) == {1: (1, 2)}
    assert named(FOUR, 0, 6, 30, 30) == {2: (2, 3)}


def test_what_all_links_have_in_common_is_no_ranks():
    assert named(FOUR, 20, 20, 20, 20) == {}
    assert named(("a", "b", "c"), 20, 20, 20) == {}


def test_none_is_slow():
    assert named(FOUR, 0, 0, 0, 0) == {}


def test_a_single_link_is_its_far_ends():
    assert named(FOUR, 0, 20, 0, 0) == {1: (1,)}
    assert named(FOUR, 0, 0, 20, 0) == {2: (2,)}
    assert named(FOUR, 20, 0, 0, 0) == {3: (0,)}, "rank 0's machine is the near one"


def test_a_single_link_is_named_only_once_the_next_one_would_be_known_to_be_slow_too():
    assert named(FOUR, 0, 20, 0, 0, steps=3) == {}
    assert named(FOUR, 0, 20, 2, 0) == {}


def test_between_two_machines_it_is_the_far_one():
    for slow in ((20, 0, 20, 0), (20, 0, 8, 0)):
        assert named(("a", "a", "b", "b"), *slow) == {2: (0, 2)}
    assert named(("a", "b"), 20, 20) == {1: (0, 1)}


def test_ranks_on_one_host_are_one_machine():
    hosts = ("a", "b", "b", "c")
    assert named(hosts, 0, 20, 0, 20) == {1: (1, 3)}, "its first rank stands for it"


def test_where_all_are_on_one_host_each_rank_is_a_machine():
    assert named(("a",) * 4, 0, 0, 20, 20) == {2: (2, 3)}


def test_expected_is_what_others_like_it_take():
    assert RingLinks(FOUR).expected_s([9, 1, 2, 3], [None] * 4) == [2, 3, 3, 2]


def test_or_what_it_used_to_take_where_that_is_less():
    assert RingLinks(FOUR).expected_s([9, 1, 2, 3], [1, None, None, 8]) == [1, 3, 3, 2]


def test_links_within_a_host_are_not_compared_with_those_between_hosts():
    ring = RingLinks(("a", "a", "b", "b"))
    # 0 and 2 lead from host to host, over the same cable; 1 and 3 stay on theirs.
    assert ring.expected_s([50, 1, 60, 2], [None] * 4) == [0, 2, 0, 1]
    assert ring.expected_s([50, 1, 60, 2], [7, None, None, None]) == [7, 2, 0, 1]


def test_names():
    ring = RingLinks(("desk", "desk", "home", "home"))
    assert ring.name((0, 2)) == "the link desk-home"
    assert ring.name((1,)) == "its links"
    assert RingLinks(FOUR).name((2, 3)) == "its links"


@pytest.mark.parametrize("world_size", [2, 3, 5])
@given(data=st.data())
def test_at_most_one_rank_is_named_and_only_for_links_of_its_machine(world_size, data):
    hosts = data.draw(st.lists(st.sampled_from("abc"), min_size=world_size, max_size=world_size))
    slow = data.draw(st.lists(st.floats(0, 50), min_size=world_size, max_size=world_size))
    found = {link for link, beyond in enumerate(slow) if beyond > 4}
    result = RingLinks(hosts).slow(found, links_of(*slow))
    assert len(result) <= 1
    one_host = len(set(hosts)) == 1
    for rank, links in result.items():
        assert links
        assert found.issuperset(links)
        for link in links:
            ends = (link, (link - 1) % world_size)
            assert rank in ends if one_host else hosts[rank] in [hosts[end] for end in ends]
