import pytest
import torch
from torch import nn

from ragtag.comm.transport import LocalTransport
from ragtag.core.errors import SettingError
from ragtag.emulate.environment import from_environment
from ragtag.emulate.link import LimitedTransport
from ragtag.emulate.memory import MemoryCap, NoMemoryLimit
from ragtag.emulate.pace import DevicePace, NoPace

HOME = """
[emulate]
sample_ms = 40
[[device]]
name = "box"
host = "desk"
memory = "24GB"
count = 2
[[device]]
name = "laptop"
host = "sofa"
speed = 0.25
flip = {period = 5, speed = 0.5}
[[link]]
between = ["desk", "sofa"]
bandwidth = "100Mbit/s"
latency = "20ms"
"""


@pytest.fixture
def emulator(tmp_path):
    made = []

    def make(rank, text=HOME):
        file = tmp_path / "home.toml"
        file.write_text(text)
        environ = {"RAGTAG_EMULATE": str(file), "MASTER_ADDR": str(tmp_path), "MASTER_PORT": "1"}
        made.append(from_environment(environ, rank))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("environ", [{}, {"RAGTAG_EMULATE": ""}])
def test_without_the_variable_nothing_is_emulated(environ):
    assert from_environment(environ, 0) is None


def test_the_rank_picks_the_expanded_device(emulator):
    assert [emulator(rank).device.name for rank in range(3)] == ["box-0", "box-1", "laptop"]
    assert isinstance(emulator(0).pace, DevicePace)
    assert isinstance(emulator(0).memory, MemoryCap)
    assert isinstance(emulator(2).memory, NoMemoryLimit)


def test_more_ranks_than_devices_is_an_error(emulator):
    with pytest.raises(SettingError, match=r"Rank 3 has no device.*describes 3.*count.*RAGTAG_EMULATE"):
        emulator(3)


def test_a_bad_file_names_the_variable(emulator, tmp_path):
    with pytest.raises(SettingError, match=r"home.toml, line 12.*spede.*RAGTAG_EMULATE"):
        emulator(0, HOME.replace("speed = 0.25", "spede = 0.25"))
    with pytest.raises(SettingError, match=r"cannot be read.*RAGTAG_EMULATE"):
        from_environment({"RAGTAG_EMULATE": str(tmp_path / "none.toml")}, 0)


def test_speeds_need_a_pace_and_memory_alone_does_not(emulator):
    with pytest.raises(SettingError, match="sample_ms = 40"):
        emulator(0, HOME.replace("sample_ms = 40", ""))
    only_memory = emulator(0, '[[device]]\nname = "box"\nmemory = "1GB"')
    assert isinstance(only_memory.pace, NoPace)
    assert "speed not emulated, memory 1 GB" in only_memory.describe()


def test_what_a_rank_pretends_to_be_is_one_line(emulator):
    assert emulator(1).describe() == (
        "rank 1 pretends to be box-1 on desk: speed 1, 40 ms a sample, memory 24 GB, 100 Mbit/s and 20 ms to sofa"
    )
    assert emulator(2).describe() == (
        "rank 2 pretends to be laptop on sofa: speed 0.25, 160 ms a sample, with flip, 100 Mbit/s and 20 ms to desk"
    )


def test_only_messages_to_other_hosts_are_limited(emulator):
    ends = LocalTransport.mesh(3)
    limited = emulator(0).limit_transport(ends[0])
    assert isinstance(limited, LimitedTransport)
    assert sorted(limited._queues) == [2]
    assert emulator(0, HOME.split("[[link]]")[0]).limit_transport(ends[0]) is ends[0]
    two = LocalTransport.mesh(2)
    assert emulator(0).limit_transport(two[0]) is two[0]


def test_transports_and_ranks_of_one_host_share_its_link(emulator):
    ends = LocalTransport.mesh(3)
    first, second = emulator(0), emulator(1)
    queues = [each.limit_transport(ends[0])._queues[2] for each in (first, first, second)]
    assert queues[0] is queues[1]
    assert [queue.reserve(5.0, 1_250_000) for queue in queues] == pytest.approx([5.12, 5.22, 5.32])


def test_votes_wait_for_their_turn_on_the_same_link(emulator):
    rank = emulator(0, HOME.replace("count = 2", "count = 1"))
    assert rank.message_delay_s(0, 1_250_000) == 0.0
    assert rank.message_delay_s(1, 1_250_000) == pytest.approx(0.12, abs=1e-6)
    waiting_s = rank.message_delay_s(1, 12_500_000)
    assert 1.019 < waiting_s < 1.121, "behind what is left of the first message"
    assert rank.limit_transport(LocalTransport.mesh(2)[0])._queues[1] is rank._queues_to_peers()[1]


def test_pace_and_memory_hook_the_same_model(emulator):
    torch.manual_seed(0)
    rank = emulator(0, '[emulate]\nsample_ms = 1\n[[device]]\nname = "box"\nmemory = "1GB"')
    model = nn.Linear(3, 1)
    rank.pace.attach(model)
    rank.memory.attach(model, None)
    with rank.pace.forward_backward(2), rank.memory.forward_backward():
        model(torch.ones(2, 3)).sum().backward()
    assert rank.memory.peak_bytes > 0
    assert rank.pace.report().regions == 1
    rank.pace.detach()
    rank.memory.detach()
    assert not any(parameter._backward_hooks for parameter in model.parameters())
