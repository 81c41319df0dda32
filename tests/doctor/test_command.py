"""`ragtag doctor` as it is typed, between real network namespaces where we may make them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ragtag.cli.doctor import parse_host, run_doctor
from ragtag.core.errors import SettingError

BIN = Path(sys.executable).parent
NETNS = Path(__file__).resolve().parents[2] / "scripts" / "netns"
NAME = f"dr{os.getpid() % 100000}x"
FAKE_TORCH = (
    "from types import SimpleNamespace\n__version__ = '{}'\ncuda = SimpleNamespace(is_available=lambda: False)\n"
)


@pytest.fixture
def environ(tmp_path):
    """Environment variables with a torch of a given version that imports in no time."""

    def environ(version="2.13.0", **variables):
        directory = tmp_path / version
        directory.mkdir(exist_ok=True)
        (directory / "torch.py").write_text(FAKE_TORCH.format(version))
        kept = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
        return kept | {"PYTHONPATH": f"{directory}{os.pathsep}src", "NO_COLOR": "1", "COLUMNS": "200"} | variables

    return environ


@pytest.fixture
def listen(tmp_path):
    """Starts `ragtag doctor --listen` and returns its port once it listens."""
    processes = []

    def listen(environ, *arguments, prefix=()):
        log = tmp_path / f"listener{len(processes)}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*prefix, BIN / "ragtag", "doctor", "--listen", "--token", "secret", *arguments],
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=output,
            )
        processes.append(process)
        deadline_s = time.monotonic() + 60
        while "Ends with" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)
        return int(log.read_text().split("listens at port ")[1].split(".")[0]), process

    yield listen
    for process in processes:
        process.kill()
        process.wait()


def run(environ, *arguments, prefix=(), timeout_s=60):
    return subprocess.run(
        [*prefix, BIN / "ragtag", "doctor", *arguments], env=environ, capture_output=True, text=True, timeout=timeout_s
    )


def test_alone(environ):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        result = run(environ(MASTER_PORT=port, MASTER_ADDR="127.0.0.1"), "--json")
    diagnosis = json.loads(result.stdout)
    assert result.returncode == 1
    assert not diagnosis["ok"]
    finding = next(finding for finding in diagnosis["findings"] if finding["code"] == "port-busy")
    assert port in finding["todo"]
    assert diagnosis["hosts"][0]["torch"]["version"] == "2.13.0"


def test_one_calls_another_and_finds_its_other_torch(environ, listen):
    port, process = listen(environ("2.12.0"), "--port", "0")
    result = run(environ(), f"127.0.0.1:{port}", "--token", "secret")
    assert result.returncode == 1
    assert "torch differs: 2.13.0 on" in result.stdout
    assert "pip install torch==2.13.0" in result.stdout
    assert "who reaches whom" in result.stdout
    assert "\x1b" not in result.stdout
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0


def test_a_busy_port_is_a_finding(environ):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        result = run(environ(), "--listen", "--bind", "127.0.0.1", "--port", str(port), "--json")
    assert result.returncode == 1
    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["code"] == "doctor-port"
    assert f"cannot listen at port {port}" in finding["what"]


def test_nobody_calls(environ):
    result = run(environ(), "--listen", "--bind", "127.0.0.1", "--port", "0", "--wait-s", "0.2")
    assert result.returncode == 1
    assert "Nobody called within 0.2 s" in result.stderr
    assert "--token " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hosts": ("a:1",), "listen": True}, "--listen takes no hosts"),
        ({"hosts": ("a:1",)}, "--token is missing"),
        ({"hosts": ("a:1", "a:1"), "token": "x"}, "named twice"),
        ({"hosts": ("a:0",), "token": "x"}, "the port must be"),
        ({"hosts": tuple(f"h{number}" for number in range(65)), "token": "x"}, "at most 64"),
        ({"port": 99}, "--port belongs to --listen"),
        ({"hosts": ("a",), "bind_address": "10.0.0.1", "token": "x"}, "--bind belongs to --listen"),
        ({"listen": True, "port": 70000}, "--port must be"),
        ({"listen": True, "wait_s": 0.0}, "--wait-s must be"),
        ({"listen": True, "token": " "}, "--token is empty"),
    ],
)
def test_wrong_words_are_told(arguments, words):
    with pytest.raises(SettingError, match=words):
        run_doctor(**arguments)


def test_wrong_words_end_with_status_2(environ):
    result = run(environ(), "desktop:port", "--token", "x")
    assert result.returncode == 2
    assert result.stderr.startswith("ragtag: error: 'desktop:port': the port must be")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("desktop", ("desktop", 29470)),
        ("desktop:99", ("desktop", 99)),
        ("[fd00::1]:99", ("fd00::1", 99)),
        ("[fd00::1]", ("fd00::1", 29470)),
        ("fd00::1", ("fd00::1", 29470)),
    ],
)
def test_addresses_as_people_write_them(text, parsed):
    assert parse_host(text) == parsed


@pytest.mark.parametrize("text", ["", ":99", "a:b", "a:99999", "[fd00::1", "[fd00::1]99", "http://a:1", "a b"])
def test_what_is_no_address(text):
    with pytest.raises(SettingError, match=r"HOST:PORT|port must be"):
        parse_host(text)


def test_the_verb_starts_without_torch():
    code = "import sys, ragtag.cli.main, ragtag.cli.doctor; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def have_namespaces():
    if not sys.platform.startswith("linux") or os.getuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"{NAME}try"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    return subprocess.run(["ip", "netns", "del", name], capture_output=True).returncode == 0


@pytest.fixture
def namespaces():
    """Three machines on one switch, 10.99.7.10, .11 and .12, as command prefixes."""
    if not have_namespaces():
        pytest.skip("network namespaces need root, iproute2 and a kernel that lets us")
    subprocess.run([NETNS, "up", "3", "none", NAME], check=True, capture_output=True)
    try:
        yield [["ip", "netns", "exec", f"{NAME}{number}"] for number in range(3)]
    finally:
        subprocess.run([NETNS, "down", "3", NAME], check=True, capture_output=True)


def unreachable(result):
    return {(way["source_address"], way["address"]): way for way in json.loads(result.stdout)["ways"] if not way["ok"]}


def test_a_pair_of_other_hosts_that_cannot_talk_is_named_in_10_seconds(environ, listen, namespaces):
    for prefix in namespaces[1:]:
        listen(environ(), prefix=prefix)
    # Machine 1 sends what is meant for machine 2 to a network card that nobody has: lost without a word.
    neighbour = ["neigh", "add", "10.99.7.12", "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
    subprocess.run([*namespaces[1], "ip", *neighbour], check=True)
    result = run(
        environ(), "10.99.7.11", "10.99.7.12", "--token", "secret", "--json", prefix=namespaces[0], timeout_s=60
    )
    diagnosis = json.loads(result.stdout)
    failed = unreachable(result)
    assert set(failed) == {("10.99.7.11", "10.99.7.12"), ("10.99.7.12", "10.99.7.11")}
    assert {way["interface"] for way in failed.values()} == {"eth0"}
    assert diagnosis["elapsed_s"] < 10
    assert result.returncode == 1
    finding = next(finding for finding in diagnosis["findings"] if finding["code"] == "unreachable")
    way = failed["10.99.7.11", "10.99.7.12"]
    assert f"10.99.7.12 port {way['port']} through interface eth0 (10.99.7.11)" in finding["what"]


def test_a_host_that_is_off_and_one_where_large_packets_get_lost(environ, listen, namespaces):
    listen(environ(), prefix=namespaces[1])
    # A switch port that takes no frame over 600 bytes drops larger ones and tells nobody.
    subprocess.run(["ip", "-n", f"{NAME}-bridge", "link", "set", "port1", "mtu", "600"], check=True)
    result = run(environ(), "10.99.7.11", "10.99.7.77", "--token", "secret", "--json", prefix=namespaces[0])
    diagnosis = json.loads(result.stdout)
    codes = {(finding["code"], finding["where"].split(" -> ")[-1]) for finding in diagnosis["findings"]}
    assert ("large-packets", "10.99.7.11:29470") in codes
    assert ("unreachable", "10.99.7.77:29470") in codes
    assert diagnosis["elapsed_s"] < 10
    assert result.returncode == 1


def test_a_firewall_that_lets_only_the_doctors_own_port_through(environ, listen, namespaces):
    port, _ = listen(environ(), prefix=namespaces[1])
    ephemeral = ["to", "10.99.7.11", "ipproto", "tcp", "dport", "32768-60999"]
    subprocess.run([*namespaces[0], "ip", "rule", "add", "pref", "1", *ephemeral, "prohibit"], check=True)
    result = run(environ(), f"10.99.7.11:{port}", "--token", "secret", "--json", prefix=namespaces[0])
    failed = unreachable(result)
    assert all(not way["control"] for way in failed.values())
    assert "10.99.7.11" in {way["address"] for way in failed.values()}
    findings = json.loads(result.stdout)["findings"]
    assert any("ports that the system chooses" in finding["todo"] for finding in findings)
    assert result.returncode == 1
