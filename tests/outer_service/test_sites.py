"""Sites as a user starts them: `ragtag launch --island`, real processes, one machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from ragtag.watch.events import AnyEvent, Contributed, Exchanged, IslandChanged

SCRIPT = Path(__file__).with_name("island_script.py")
RAGTAG = str(Path(sys.executable).with_name("ragtag"))
LONG_S = 90.0


class Site:
    """One `ragtag launch`."""

    def __init__(self, directory: Path, name: str, *words: str, steps: int, local: int = 1, **environ: str) -> None:
        self.name, self.directory, self.pids = name, directory / name, directory
        self.output = directory / f"{name}.out"
        known = {key: value for key, value in os.environ.items() if not key.startswith("RAGTAG_")}
        with open(self.output, "wb") as file:
            self.process = subprocess.Popen(
                [
                    *(RAGTAG, "launch", "--no-page", "--local", str(local)),
                    *("--island", name, "--run-dir", str(self.directory), *words, str(SCRIPT), str(steps), "0.005"),
                ],
                env={
                    **known,
                    "RAGTAG_TOKEN": "a-token-of-the-tests",
                    "RAGTAG_PATIENCE_S": "5",
                    "RAGTAG_INNER_STEPS": "10",
                    "RAGTAG_WARM_UP_STEPS": "5",
                    "OMP_NUM_THREADS": "1",
                    "ISLAND_PIDS": str(directory),
                    **environ,
                },
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def result(self) -> dict:
        """What its script has printed at its end."""
        status = self.process.wait(LONG_S)
        assert status == 0, self.text
        lines = [line for line in self.text.splitlines() if line.startswith("RESULT ")]
        assert lines, self.text
        return json.loads(lines[-1].removeprefix("RESULT "))

    def events(self) -> list[AnyEvent]:
        lines = (self.directory / "log.jsonl").read_bytes().splitlines()
        return [msgspec.json.decode(line, type=AnyEvent) for line in lines]

    def kill_worker(self, number: int) -> None:
        os.kill(int((self.pids / f"{self.name}-{number}").read_text()), signal.SIGKILL)


@contextmanager
def two_sites(directory: Path, *, steps: int, local: int = 1, words: tuple[str, ...] = (), **environ: str) -> Iterator:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sites: list[Site] = []
    try:
        sites.append(Site(directory, "home", "--port", str(port), *words, steps=steps, local=local, **environ))
        deadline_s = time.monotonic() + LONG_S
        while "other sites join with" not in sites[0].text:
            assert time.monotonic() < deadline_s, sites[0].text
            time.sleep(0.05)
        hub = f"127.0.0.1:{port}"
        sites.append(Site(directory, "cloud", "--hub", hub, steps=steps, local=local, **environ))
        yield tuple(sites)
    finally:
        for site in sites:
            if site.process.poll() is None:
                site.process.send_signal(signal.SIGTERM)
        for site in sites:
            site.process.wait(LONG_S)


def await_line(site: Site, text: str) -> None:
    deadline_s = time.monotonic() + LONG_S
    while text not in site.text:
        assert time.monotonic() < deadline_s, (text, site.text)
        assert site.process.poll() is None, site.text
        time.sleep(0.05)


def parts(site: Site) -> list[Contributed]:
    return [part for event in site.events() if isinstance(event, Exchanged) for part in event.islands]


@pytest.mark.timeout(180)
def test_two_sites_train_one_model_and_end_with_the_same_values(tmp_path):
    with two_sites(tmp_path, steps=500) as (home, cloud):
        results = [home.result(), cloud.result()]
    assert results[0]["sum"] == results[1]["sum"]
    assert results[0]["norm"] == results[1]["norm"]
    assert results[0]["loss"] < 1.0
    assert results[1]["last_step"] == 500
    first, second = sorted(each["first_step"] for each in results)
    assert first == 1  # whoever came first has warmed up
    assert second > 5  # the other one went on where all were
    together = [event for event in home.events() if isinstance(event, Exchanged) and len(event.islands) == 2]
    assert len(together) > 20
    assert {part.island for part in parts(home)} == {"home", "cloud"}
    # int4, but for the last round.
    assert sum(part.plain_bytes for part in parts(home)) > 5 * sum(part.sent_bytes for part in parts(home))


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [0, 1])
def test_a_worker_of_an_island_is_killed_and_another_one_joins(tmp_path, number):
    with two_sites(tmp_path, steps=1500, local=2) as (home, cloud):
        await_line(home, "island cloud: from")
        time.sleep(1.0)
        cloud.kill_worker(number)
        results = [home.result(), cloud.result()]
    assert "was killed by SIGKILL; starting another one" in cloud.text
    assert results[0]["sum"] == results[1]["sum"]
    if number == 0:
        lost = [event for event in home.events() if isinstance(event, IslandChanged) and event.change == "lost"]
        assert [event.island for event in lost] == ["cloud"]


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_outer_process_is_killed_and_comes_back(tmp_path):
    with two_sites(tmp_path, steps=1500) as (home, cloud):
        await_line(home, "island cloud: from")
        time.sleep(1.0)
        children = Path(f"/proc/{home.process.pid}/task/{home.process.pid}/children").read_text().split()
        outer = [pid for pid in children if b"ragtag.outer" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(outer[0]), signal.SIGKILL)
        results = [home.result(), cloud.result()]
    assert "the outer loop" in home.text
    assert "was killed by SIGKILL; starting it again" in home.text
    assert results[0]["sum"] == results[1]["sum"]


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_site_is_gone_for_good_and_the_other_one_ends_by_itself(tmp_path):
    with two_sites(tmp_path, steps=800) as (home, cloud):
        await_line(home, "island cloud: from")
        os.killpg(cloud.process.pid, signal.SIGKILL)
        result = home.result()
        assert result["last_step"] == 800
        assert "island cloud: its connection closed" in home.text
        cloud.process.wait()
