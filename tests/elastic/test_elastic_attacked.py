"""Training goes on, undisturbed, while strangers do what they can at the hub's port."""

import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.elastic.crew import Crew
from tests.elastic.test_elastic_training import check, train
from tests.hub.running import LONG_S, raw
from tests.hub.test_hub_server import GARBAGE, upgrade
from tests.ranks import solo

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 40


class Strangers:
    """Threads that attack a port in their own ways until they are told to stop. Use as a context manager."""

    def __init__(self, port: int) -> None:
        self._port, self._over = port, threading.Event()
        self.num_attacks = Counter[str]()
        self.answers: set[bytes] = set()
        """Status lines that guesses of the token got."""
        self._dawdlers: list[socket.socket] = []
        ways = {"guess": self._guess, "garbage": self._garbage, "flood": self._flood, "dawdle": self._dawdle}
        self._threads = [threading.Thread(target=self._repeat, args=each) for each in ways.items()]

    def __enter__(self) -> "Strangers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30.0)
        for dawdler in self._dawdlers:
            dawdler.close()

    def _repeat(self, name: str, attack: Callable[[], None]) -> None:
        while not self._over.wait(0.01):
            self.num_attacks[name] += 1
            with suppress(OSError):
                attack()

    def _guess(self) -> None:
        """The wrong token."""
        self.answers.add(self._said(upgrade("guess"), LONG_S).partition(b"\r\n")[0])

    def _garbage(self) -> None:
        """What is no request, or none that the hub answers."""
        kinds = list(GARBAGE.values())
        self._said(kinds[self.num_attacks["garbage"] % len(kinds)], 0.2)

    def _flood(self) -> None:
        """Many connections at once."""
        for sock in [raw(self._port) for _ in range(20)]:
            sock.close()

    def _dawdle(self) -> None:
        """A request that comes byte by byte, on many connections."""
        if len(self._dawdlers) < 100:
            self._dawdlers.append(raw(self._port, upgrade("guess")[:20]))
        for dawdler in self._dawdlers:
            with suppress(OSError):
                dawdler.send(b"x")

    def _said(self, data: bytes, timeout_s: float) -> bytes:
        with raw(self._port) as sock:
            sock.settimeout(timeout_s)
            sock.sendall(data)
            return sock.recv(4096)


def test_strangers_at_the_hubs_port_do_not_disturb_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reference = solo(train, None, STEPS)
    with Crew(tmp_path, expected=2, patience_s=5.0) as crew, Strangers(crew.port) as strangers:
        for name in "ab":
            crew.start(name, train, None, STEPS, 0.03)
        crew.wait_for_step(STEPS // 2, "a")
        crew.start("c", train, None, STEPS, 0.03)
        results = crew.results("a", "b")
        for result in results.values():
            check(result, reference)
            assert [number for number, _, _ in result["generations"]] == list(range(1, STEPS + 1))
        late = crew.results("c")["c"]
        if isinstance(late, dict):
            check(late, reference)
        said = capfd.readouterr().err
    print(dict(strangers.num_attacks), type(late))
    assert min(strangers.num_attacks.values()) >= 3, strangers.num_attacks
    assert strangers.answers - {b""} == {b"HTTP/1.1 401 Unauthorized"}
    # One line for all of them until some seconds have passed: of whom comes first.
    assert "refused 127.0.0.1:" in said or "a connection from 127.0.0.1:" in said, said
    assert "given up" not in said
    assert "no sign of life" not in said, said
