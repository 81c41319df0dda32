"""Several machines, one run: cables are pulled, launchers killed, and the parameters stay as if nothing had been."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.elastic.machine_script import train
from tests.elastic.machines import NETNS, Machine, have_namespaces
from tests.ranks import solo

PATIENCE_S = 3.0


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[[int], list[Machine]]]:
    """Makes so many machines on one switch."""
    if not have_namespaces():
        pytest.skip("network namespaces need root, iproute2 and a kernel that lets us")
    name, made = f"el{os.getpid() % 100000}x", []

    def make(number: int) -> list[Machine]:
        subprocess.run([NETNS, "up", str(number), "none", name], check=True, capture_output=True)
        made.extend(Machine(name, each, tmp_path, PATIENCE_S) for each in range(number))
        return made

    try:
        yield make
    finally:
        for machine in made:
            machine.close()
        if made:
            subprocess.run([NETNS, "down", str(len(made)), name], check=True, capture_output=True)


def end_run(machines: list[Machine]) -> None:
    """Let all scripts end after the same step, soon."""
    directory = machines[0].directory
    written = directory / "end.new"
    written.write_text(str(max(machine.newest()[0] for machine in machines) + 40))
    written.rename(directory / "end")


def check(machines: list[Machine], *, finals: int) -> None:
    """Every step was committed with one value, and who ended has the parameters of one process."""
    directory = machines[0].directory
    losses: dict[int, set[str]] = {}
    for machine in machines:
        for steps in machine.steps().values():
            for number, loss, _ in steps:
                losses.setdefault(number, set()).add(loss)
            numbers = [number for number, _, _ in steps]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    several = {number: values for number, values in losses.items() if len(values) > 1}
    assert not several, "steps were committed with different values"
    assert sorted(losses) == list(range(1, max(losses) + 1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = torch.tensor(solo(train, directory), dtype=torch.float64)
    torch.set_num_threads(threads)
    written = [file.read_text().split() for file in directory.glob("*.final")]
    assert len(written) == finals
    for values in written:
        mine = torch.tensor([float.fromhex(value) for value in values], dtype=torch.float64)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-9)


def test_a_machine_joins_loses_its_cable_comes_back_and_its_launcher_is_killed(
    machines: Callable[[int], list[Machine]],
) -> None:
    home, desk = machines(2)
    home.type("--address", home.address, "--local", "2")
    token, hub = home.join_line()
    assert hub.startswith(f"{home.address}:")
    home.reaches(ranks=2)
    desk.type("--hub", hub, token=token)
    home.reaches(ranks=3)

    desk.pull_cable()
    cut_s = home.reaches(ranks=2, timeout_s=4 * PATIENCE_S)
    assert cut_s < 2 * PATIENCE_S + 1.0
    said = home.line("no sign of life from desk/0 (desk) for")
    assert "frozen or unreachable" in said
    desk.line(f"waiting for {hub} to be reachable again")
    desk.plug_in()
    home.reaches(ranks=3)
    assert "desk/0 (desk) has joined" in home.terminal

    desk.kill()
    home.reaches(ranks=2, timeout_s=2 * PATIENCE_S)
    end_run([home, desk])
    assert home.status() == 0
    check([home, desk], finals=2)


def test_a_run_ends_on_all_machines_when_the_one_with_the_hub_is_gone(
    machines: Callable[[int], list[Machine]],
) -> None:
    home, desk = machines(2)
    checkpoints = home.directory / "checkpoints"
    keeping = {"RAGTAG_CHECKPOINT": str(checkpoints), "RAGTAG_CHECKPOINT_EVERY_STEPS": "20"}
    home.type("--address", home.address, **keeping)
    token, hub = home.join_line()
    home.reaches(ranks=1)
    desk.type("--hub", hub, token=token, **keeping)
    desk.reaches(ranks=2, steps=25)

    home.kill()
    began_s = time.monotonic()
    assert desk.status() == 75
    assert time.monotonic() - began_s < PATIENCE_S + 4.0
    errors = [line for line in desk.terminal.splitlines() if line.startswith("ragtag: ") and "% " not in line]
    assert len(errors) == 1, desk.terminal
    assert errors[0].startswith(f"ragtag: the hub at {hub} has not been heard (patience_s={PATIENCE_S:g})")
    assert f"last checkpoint is {checkpoints}/" in errors[0]
    last = desk.terminal.splitlines()[-1]
    assert last.startswith(f"ragtag launch: nothing listens at {hub} any more: the run has ended"), last
    assert "Traceback" not in desk.terminal


@pytest.mark.long
def test_of_two_halves_the_one_with_the_hub_goes_on_and_the_other_comes_back(
    machines: Callable[[int], list[Machine]],
) -> None:
    home, desk, shed = machines(3)
    home.type("--address", home.address)
    token, hub = home.join_line()
    home.reaches(ranks=1)
    for other in (desk, shed):
        other.type("--hub", hub, token=token)
    home.reaches(ranks=3)

    for other in (desk, shed):  # which still reach each other
        other.plug_in(switch=1)
    home.reaches(ranks=1, timeout_s=5 * PATIENCE_S)
    at = desk.newest()[0]
    for other in (desk, shed):
        other.line("to be reachable again")
        assert other.newest()[0] <= at + 1
    for other in (desk, shed):
        other.plug_in()
    home.reaches(ranks=3)
    desk.kill(signal.SIGINT)  # which on a machine that has joined ends what is there
    assert desk.status() == 130
    assert desk.terminal.splitlines()[-1].startswith("ragtag launch: stopped by SIGINT; this machine has left the run")
    home.reaches(ranks=2)
    assert "desk/0 (desk) has left" in home.terminal
    end_run([home, desk, shed])
    assert [home.status(), shed.status()] == [0, 0]
    check([home, desk, shed], finals=2)


@pytest.mark.long
def test_a_machine_that_another_one_cannot_reach_does_not_stop_the_run(
    machines: Callable[[int], list[Machine]],
) -> None:
    home, desk, shed = machines(3)
    # What desk sends to shed goes to a network card that nobody has.
    neighbour = ["neigh", "add", shed.address, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
    subprocess.run(["ip", "-n", desk.namespace, *neighbour], check=True)
    home.type("--address", home.address)
    token, hub = home.join_line()
    desk.type("--hub", hub, token=token)
    home.reaches(ranks=2)
    shed.type("--hub", hub, token=token)
    said = shed.line("ragtag: ")
    assert said.startswith("ragtag: shed/0 (shed) was taken in, but not for long"), said
    # Whichever of the three is first to say that it failed: the two that cannot talk, or the one that heard of it.
    assert "cannot be reached by other members" in said or "generations with it fail time and again" in said, said
    shed.kill()
    home.reaches(ranks=2)
