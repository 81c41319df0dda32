import socket
import threading
import time

import pytest
from torch.distributed import HashStore

from ragtag.comm import rendezvous
from ragtag.comm.environment import Place, read_environment
from ragtag.comm.group import SoloGroup
from ragtag.comm.rendezvous import Introduction, check_addresses, connect
from ragtag.core.errors import LaunchError
from tests.ranks import run_ranks

COMPLETE = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"MASTER_ADDR": "10.0.0.1"}])
def test_one_process_needs_no_network_and_no_thread(environ):
    threads = threading.active_count()
    group = connect(30.0, environ)
    assert isinstance(group, SoloGroup)
    assert (group.rank, group.world_size, threading.active_count()) == (0, 1, threads)
    assert group.close()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"WORLD_SIZE": None}, ["RANK=1 is set", "WORLD_SIZE is not", "torchrun"]),
        ({"RANK": None}, ["WORLD_SIZE=3 is set", "RANK is not", "torchrun"]),
        ({"RANK": None, "WORLD_SIZE": "", "LOCAL_RANK": "0"}, ["LOCAL_RANK=0 is set", "RANK is not"]),
        ({"RANK": "one"}, ["RANK='one'", "from 0 to 2"]),
        ({"RANK": "3"}, ["RANK='3'", "WORLD_SIZE=3", "from 0 to 2"]),
        ({"RANK": "-1"}, ["RANK='-1'"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE='0'"]),
        ({"MASTER_ADDR": None}, ["MASTER_ADDR is not", "torchrun"]),
        ({"MASTER_PORT": None}, ["MASTER_PORT is not"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT='70000'", "65535"]),
        ({"LOCAL_RANK": "x"}, ["LOCAL_RANK='x'"]),
    ],
)
def test_half_an_environment_is_an_error_that_names_the_variable(changes, parts):
    environ = {name: value for name, value in (COMPLETE | changes).items() if value is not None}
    with pytest.raises(LaunchError) as caught:
        connect(30.0, environ)
    for part in parts:
        assert part in str(caught.value)


def test_torchruns_environment_is_read_completely():
    environ = COMPLETE | {"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x7", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert read_environment(environ) == Place(
        rank=1, world_size=3, local_rank=1, address="127.0.0.1", port=29500, run_id="x7", agent_hosts_store=True
    )
    place = read_environment(COMPLETE | {"RANK": "0", "RAGTAG_STORE_FD": "7"})
    assert place is not None
    assert (place.store_fd, place.agent_hosts_store) == (7, False)


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"MASTER_PORT={port}: Address already in use.*Set MASTER_ADDR"):
            connect(1.0, COMPLETE | {"RANK": "0", "MASTER_PORT": str(port)})


def test_an_address_of_another_host_is_named():
    with pytest.raises(LaunchError, match=r"cannot listen on MASTER_ADDR=192\.0\.2\.1"):
        connect(1.0, COMPLETE | {"RANK": "0", "MASTER_ADDR": "192.0.2.1"})


def test_nobody_listening_is_named_within_ten_times_the_patience():
    port = str(free_port())
    began_s = time.monotonic()
    with pytest.raises(LaunchError, match=rf"nobody listening at MASTER_ADDR=127.*MASTER_PORT={port}.*nc -vz"):
        connect(0.05, COMPLETE | {"MASTER_PORT": port})
    assert time.monotonic() - began_s < 5


def test_a_socket_that_is_not_the_launchers_is_refused():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        environ = COMPLETE | {"RANK": "0", "MASTER_PORT": str(free_port()), "RAGTAG_STORE_FD": str(other.fileno())}
        with pytest.raises(LaunchError, match="RAGTAG_STORE_FD"):
            connect(1.0, environ)


def introduction(rank, host="alpha", boot_id="a", address="127.0.0.1"):
    return Introduction(rank=rank, host=host, boot_id=boot_id, address=address, nonce=f"nonce{rank}")


def test_loopback_is_for_one_machine_only():
    check_addresses([introduction(0), introduction(1)], "127.0.0.1")
    far = introduction(1, host="beta", boot_id="b", address="10.0.0.2")
    check_addresses([introduction(0, address="10.0.0.1"), far], "10.0.0.1")
    with pytest.raises(LaunchError, match=r"Rank 0 \(alpha\) would listen on 127\.0\.1\.1.*MASTER_ADDR=alpha"):
        check_addresses([introduction(0, address="127.0.1.1"), far], "alpha")
    with pytest.raises(LaunchError, match="2 machines"):
        check_addresses([introduction(0), introduction(1, boot_id="b")], "127.0.0.1")


def place(rank, world_size=2):
    return Place(rank=rank, world_size=world_size, local_rank=0, address="alpha", port=29500)


def test_stale_keys_of_an_earlier_generation_are_never_read():
    store = HashStore()
    generations = set()
    for turn in range(3):
        people = [
            Introduction(rank=rank, host="alpha", boot_id="a", address="127.0.0.1", nonce=f"{turn}.{rank}")
            for rank in (0, 1)
        ]
        met = {}

        def meet(rank, people=people, met=met):
            met[rank] = rendezvous._meet(store, place(rank), people[rank], time.monotonic() + 10)

        # Rank 1 asks first: it must not take the answers that the generation before it left in the store.
        threads = [threading.Thread(target=meet, args=(rank,)) for rank in (1, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert met[0] == met[1] == (f"{turn}.0", tuple(people))
        generations.add(met[0][0])
    assert len(generations) == 3


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(LaunchError, match=r"waited for 3 ranks at alpha:29500, but these did not come: 1, 2"):
        rendezvous._meet(HashStore(), place(0, 3), introduction(0), time.monotonic() + 0.05)


def test_two_processes_with_one_rank_are_told():
    store = HashStore()
    with pytest.raises(LaunchError, match="did not come: 1"):
        rendezvous._meet(store, place(0), introduction(0), time.monotonic() + 0.02)
    twin = Introduction(rank=0, host="beta", boot_id="a", address="127.0.0.1", nonce="nonce0")
    with pytest.raises(LaunchError, match=r"both RANK=0: this one on beta and another one on alpha"):
        rendezvous._meet(store, place(0), twin, time.monotonic() + 1)


def fails_to_agree_on_the_world():
    import os

    if os.environ["RANK"] == "0":
        os.environ["WORLD_SIZE"] = "1"
    group = connect(0.2)
    return group.world_size


def test_a_store_nobody_serves_is_bounded():
    """Rank 0 holds the launcher's socket and never serves it, because it believes that it is alone."""
    outcomes = run_ranks(2, fails_to_agree_on_the_world, expect_failures=True)
    assert outcomes[0] == 1
    assert isinstance(outcomes[1], LaunchError)
