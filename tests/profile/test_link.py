import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.comm.transport import LocalTransport
from ragtag.profile.link import measure_link, pairs_to_measure
from ragtag.profile.ping import Asker, answer


class Wire:
    """A link with exact arithmetic and its own clock."""

    def __init__(self, bandwidth_bytes_per_s, latency_s, burst_bytes=0):
        self.bandwidth_bytes_per_s, self.latency_s = bandwidth_bytes_per_s, latency_s
        self.now_s = 0.0
        self.burst_bytes = burst_bytes

    def round_trip(self, num_bytes):
        taken_s = 2 * self.latency_s + max(0, num_bytes - self.burst_bytes) / self.bandwidth_bytes_per_s
        self.now_s += taken_s
        return taken_s


@given(bandwidth=st.floats(1e5, 1e11), latency_s=st.floats(1e-5, 0.3))
def test_bandwidth_and_latency_are_found_in_time(bandwidth, latency_s):
    wire = Wire(bandwidth, latency_s)
    link = measure_link(wire.round_trip, between=("a", "b"), budget_s=4.0, clock=lambda: wire.now_s)
    assert math.isclose(link.latency_s, latency_s, rel_tol=1e-6)
    # 1 us is the finest difference that is believed, 12 KiB the least one of sizes.
    assert math.isclose(link.bandwidth_bytes_per_s, bandwidth, rel_tol=1e-3) or bandwidth > 12 * 1024 / 1e-6
    assert wire.now_s < 12 + 8 * (2 * latency_s + 2**14 / bandwidth)


def test_a_burst_that_a_shaped_link_lets_pass_is_not_taken_for_bandwidth():
    wire = Wire(25e6, 1e-4, burst_bytes=256_000)
    link = measure_link(wire.round_trip, between=("a", "b"), clock=lambda: wire.now_s)
    assert math.isclose(link.bandwidth_bytes_per_s, 25e6, rel_tol=1e-6)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9))
def test_every_pair_of_hosts_and_every_shared_host_is_measured_once(hosts):
    pairs = pairs_to_measure(hosts)
    between = [frozenset((hosts[one], hosts[other])) for one, other in pairs]
    different = set(hosts)
    expected = {frozenset((a, b)) for a in different for b in different if a != b}
    expected |= {frozenset((host,)) for host in different if hosts.count(host) > 1}
    assert len(between) == len(set(between))
    assert set(between) == expected
    assert all(one != other for one, other in pairs)


def test_round_trips_over_a_transport():
    one, other = LocalTransport.mesh(2, timeout_s=5.0)
    thread = threading.Thread(target=answer, args=(other, 0))
    thread.start()
    end = Asker(one, 1)
    for num_bytes in (0, 1000, 10, 0, 4000):
        assert end.round_trip(num_bytes) > 0
    end.close()
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_peer_that_is_gone_ends_it():
    one, other = LocalTransport.mesh(2, timeout_s=5.0)
    other.close()
    with pytest.raises(Exception, match="closed its connection"):
        Asker(one, 1).round_trip(100)
