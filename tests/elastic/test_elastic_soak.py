"""Random faults one after another, in an order that a seed fixes: the parameters stay those of an undisturbed run.

The first worker is never harmed, and tells at the end what it has gathered: threads, open files, memory.
"""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ragtag
from tests.elastic.crew import Crew, tell_step
from tests.ranks import solo

DATA = [(torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(101)]
PATIENCE_S = 4.0
_SETTLED = 40


def train(steps: int, pause_s: float) -> dict[str, Any]:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    trainer = ragtag.Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        DATA,
        global_batch_size=11,
        config=ragtag.Config(patience_s=PATIENCE_S),
    )
    own = psutil.Process()
    began = (0, 0, 0)
    generations = set()
    for report in trainer.steps(steps):
        generations.add(report.generation)
        tell_step(report.number)
        if report.number == _SETTLED:
            began = held(own)
        time.sleep(pause_s)
    # What the newest generations have left is let go of within seconds.
    end_s = time.monotonic() + 3 * PATIENCE_S
    ended = held(own)
    while (ended[0] > began[0] or ended[1] > began[1]) and time.monotonic() < end_s:
        time.sleep(0.1)
        ended = min(ended, held(own))
    values = [p.detach().clone() for p in model.parameters()]
    trainer.close()
    return {"values": values, "began": began, "ended": ended, "generations": len(generations)}


def held(own: psutil.Process) -> tuple[int, int, int]:
    """Threads, open files and bytes of memory of this process."""
    return threading.active_count(), own.num_fds(), own.memory_info().rss


def soak(directory: Path, *, steps: int, pause_s: float, seed: int, least_faults: int) -> dict[str, int]:
    """Train under faults; return how often each happened."""
    reference = solo(train, steps, 0.0)
    luck = random.Random(seed)
    counts: dict[str, int] = {"kill": 0, "stop": 0, "hub": 0, "join": 0}
    with Crew(directory, patience_s=PATIENCE_S, expected=3) as crew:
        for name in ("first", "w0", "w1"):
            crew.start(name, train, steps, pause_s)
        crew.wait_for_step(_SETTLED, "first")
        alive, number = ["w0", "w1"], 2
        while crew.workers["first"].is_alive() and crew._step_of("first") < steps - 30:
            # Who was given up while it was frozen ends once it wakes.
            alive = [name for name in alive if crew.workers[name].is_alive()]
            act = luck.choices(["kill", "stop", "hub", "join"], [5, 1, 1, 4])[0]
            if act == "kill" and alive:
                victim = alive.pop(luck.randrange(len(alive)))
                crew.signal(victim)
            elif act == "stop" and alive:
                victim = luck.choice(alive)
                crew.signal(victim, signal.SIGSTOP)
                time.sleep(luck.choice([0.3, 1.3 * PATIENCE_S]))
                crew.signal(victim, signal.SIGCONT)
            elif act == "hub":
                crew.kill_hub()
                time.sleep(luck.choice([0.0, 0.2 * PATIENCE_S]))
                crew.start_hub()
            elif act == "join" and len(alive) < 3:
                name, number = f"w{number}", number + 1
                crew.start(name, train, steps, pause_s)
                alive.append(name)
            else:
                continue
            counts[act] += 1
            time.sleep(luck.uniform(0.0, 0.6))
        result = crew.results("first", timeout=60.0)["first"]
        assert isinstance(result, dict), result
        for mine, expected in zip(result["values"], reference["values"]):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-9)
        for process in crew.workers.values():
            process.join(10.0)
        lasting = [name for name, process in crew.workers.items() if process.is_alive()]
        assert not lasting, f"{lasting} still run"
        assert sum(counts.values()) >= least_faults, counts
        (threads, files, memory), (threads_now, files_now, memory_now) = result["began"], result["ended"]
        assert threads_now <= threads + 8, "threads are left behind"
        # Sockets of a generation that a frozen worker was in stay for some patiences.
        assert files_now <= files + 48, "open files are left behind"
        assert memory_now <= memory + (64 << 20), "memory grows"
        print(counts, result["generations"], result["began"], result["ended"])
    return counts


def test_a_short_soak(tmp_path: Path) -> None:
    soak(tmp_path, steps=400, pause_s=0.02, seed=1, least_faults=5)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_long_soak(tmp_path: Path) -> None:
    soak(tmp_path, steps=12000, pause_s=0.02, seed=int(os.environ.get("RAGTAG_SOAK_SEED", "7")), least_faults=200)
