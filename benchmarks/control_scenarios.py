"""What following speeds gains and loses: the controller on simulated devices, beside equal and beside the best shares.

    scripts/bench control_scenarios            # the table of docs/control.md; the same numbers on every machine
    scripts/bench control_scenarios --cost     # microseconds that one step costs the controller, on this machine
    scripts/bench control_scenarios --json

Every scenario replays the same random draws three times: under equal shares throughout, under the controller (which
starts with equal shares), and under each step's best shares for somebody who knows the speeds, but not the draws,
beforehand. Devices that are parked are compared with the best shares too, so trying them shows as a loss.
"""

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))  # the simulated devices are those of the tests
from tests.control.simulated import Devices, equal_plan, fixed, foreseen, run

from ragtag.control.controller import Controller
from ragtag.control.observation import Observation

FOUR = (1, 1, 0.5, 0.25)
NOISY_SEEDS = 4


@dataclass(frozen=True)
class Scenario:
    what: str
    devices: list[Devices]
    """One for each repetition."""
    batch: int
    steps: int


def scenarios() -> list[Scenario]:
    def noisy(speeds: tuple[float, ...], jitter: float) -> list[Devices]:
        return [Devices(speeds=speeds, jitter=jitter, seed=seed) for seed in range(NOISY_SEEDS)]

    def once(**settings) -> list[Devices]:
        return [Devices(**settings)]

    fixed_costs = {"fixed_s": [0.02, 0.02, 0.08], "apply_s": [0.01, 0.01, 0.04]}
    slides = [lambda step: 1 - 0.4 * min(max(step - 20, 0), 50) / 50, *FOUR[1:]]
    used = [lambda step: 0.5 if 40 <= step < 60 else 1, *FOUR[1:]]
    flips = [lambda step: 0.5 if step // 5 % 2 else 1, *FOUR[1:]]
    returns = [1, 1, lambda step: 0.05 if step < 60 else 1]
    return [
        Scenario("speeds 1, 1, 1/2, 1/4", once(speeds=FOUR), 44, 100),
        Scenario("speeds 1, 1, 1/10", once(speeds=[1, 1, 0.1]), 42, 100),
        Scenario("equal speeds, 2 % noise", noisy((1, 1, 1), 0.02), 42, 200),
        Scenario("equal speeds, 30 % noise", noisy((1, 1, 1), 0.3), 42, 200),
        Scenario("speeds 1, 1, 1/2, 1/4, 5 % noise", noisy(FOUR, 0.05), 44, 200),
        Scenario("speeds 1, 1, 1/2, 1/4, 30 % noise", noisy(FOUR, 0.3), 44, 200),
        Scenario("speeds 1, 1, 1/4 with fixed costs", once(speeds=[1, 1, 0.25], **fixed_costs), 72, 100),
        Scenario("one gets 4 times slower", once(speeds=[lambda step: 1 if step < 40 else 0.25, *FOUR[1:]]), 44, 100),
        Scenario("one gets 4 times faster", once(speeds=[lambda step: 0.25 if step < 40 else 1, *FOUR[1:]]), 44, 100),
        Scenario("one slides to 60 % in 50 steps", once(speeds=slides), 44, 100),
        Scenario("one at half speed for 20 steps", once(speeds=used), 44, 100),
        Scenario("one flips every 5 steps", once(speeds=flips), 44, 200),
        Scenario("one too slow for a single sample", once(speeds=[1, 1, 1], fixed_s=[0, 0, 0.5]), 12, 400),
        Scenario("one too slow, recovers at step 60", once(speeds=returns), 12, 300),
    ]


def measure(scenario: Scenario) -> dict[str, object]:
    """Times are relative to those with the best shares, over all steps, the first equal ones included."""
    batch, steps = scenario.batch, scenario.steps
    best_s = equal_s = controlled_s = 0.0
    changes, kinds, errors, etas = [], [], [], []
    for devices in scenario.devices:
        best_s += sum(seen.wall_s for seen in foreseen(devices, batch, steps))
        equal_s += sum(seen.wall_s for seen in fixed(devices, equal_plan(len(devices.speeds), batch), steps))
        result = run(devices, batch, steps)
        controlled_s += result.total_s()
        etas.append(result.eta(first=11))
        changes.append(sum(decision.kind != "try" for decision in result.controller.history))
        kinds.append(sum(decision.kind == "try" for decision in result.controller.history))
        errors += [
            abs(decision.achieved_step_s / decision.predicted_step_s - 1)
            for decision in result.controller.history
            if decision.achieved_step_s and decision.achieved_over == 8
        ]
    return {
        "scenario": scenario.what,
        "steps": steps,
        "equal": round(equal_s / best_s, 3),
        "ragtag": round(controlled_s / best_s, 3),
        "eta": round(statistics.mean(etas), 3),
        "changes": statistics.mean(changes),
        "tries": statistics.mean(kinds),
        "prediction_error": round(statistics.median(errors), 3) if errors else None,
    }


def print_table(rows: list[dict[str, object]]) -> None:
    print("| scenario | steps | equal | ragtag | eta | changes | tries | prediction off by |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        error = "-" if row["prediction_error"] is None else f"{row['prediction_error']:.1%}"
        print(
            f"| {row['scenario']} | {row['steps']} | {row['equal']:.2f} | {row['ragtag']:.3f} | {row['eta']:.2f} "
            f"| {row['changes']:g} | {row['tries']:g} | {error} |"
        )


def cost_us(ranks: int, noise: float) -> float:
    """Median processor microseconds of `Controller.observe` with full windows, in blocks of ten steps."""
    draws = random.Random(0)
    controller, blocks = Controller(equal_plan(ranks, 8 * ranks)), []
    empty = Devices(speeds=(1.0,) * ranks).step(1, controller.plan)
    for first in range(0, 400, 10):
        block: list[Observation] = []
        for step in range(first, first + 10):
            compute = tuple(0.05 * (1 + noise * draws.gauss(0, 1)) for _ in range(ranks))
            apply = (0.005,) * ranks
            wall_s = max(compute) + 0.006
            block.append(
                msgspec.structs.replace(empty, step=step, compute_s=compute, apply_s=apply, comm_s=0.001, wall_s=wall_s)
            )
        started = time.thread_time()
        for seen in block:
            controller.observe(seen)
        if first >= 200:
            blocks.append((time.thread_time() - started) / len(block))
    return statistics.median(blocks) * 1e6


def print_cost() -> None:
    print("| ranks | noise | us a step | us a step and rank |")
    print("|---|---|---|---|")
    for ranks in (4, 16, 64):
        for noise in (0.003, 0.02):
            cost = cost_us(ranks, noise)
            print(f"| {ranks} | {noise:.1%} | {cost:.0f} | {cost / ranks:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.cost:
        print_cost()
        return
    rows = [measure(scenario) for scenario in scenarios()]
    if arguments.json:
        print(json.dumps(rows))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
