"""A plan as tables for a terminal: candidates, the chosen one's devices, what each device is worth."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ragtag.core.quantities import format_bytes
from ragtag.cost.candidate import DevicePrediction, Part
from ragtag.cost.problem import Problem
from ragtag.plan.search import Choice, Priced
from ragtag.plan.verdict import Verdict

_MOST_DEVICES = 32


def show(
    problem: Problem,
    choice: Choice,
    verdicts: Sequence[Verdict],
    edits: Sequence[str],
    before_samples_per_s: float | None,
    console: Console,
) -> None:
    """Print what was looked at, what was taken and why, and the verdicts."""
    if before_samples_per_s is not None:
        change = choice.best.rate / before_samples_per_s - 1
        console.print(
            f"what if {', '.join(edits)}: {before_samples_per_s:.4g} -> {choice.best.rate:.4g} samples/s "
            f"({change:+.1%})",
            markup=False,
            highlight=False,
        )
    console.print(_candidates(choice))
    for remark in _remarks(choice):
        _print(console, remark)
    _print(console, f"chosen: {choice.reason}")
    console.print(_devices(problem, choice.best))
    if not any(device.memory is not None for device in problem.alike):
        _print(console, "memory was not measured, so nothing limits micro-batches here")
    for verdict in verdicts:
        several = f" (one of {verdict.count} alike)" if verdict.count > 1 else ""
        _print(console, verdict.text + several)


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _candidates(choice: Choice) -> Table:
    table = Table(box=SIMPLE_HEAD, title="Candidates", title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("plan", overflow="fold")
    for name in ("samples/s", "eta", "step ms", "compute", "exposed", "wait", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, priced in enumerate(choice.candidates):
        prediction = priced.prediction
        if prediction is None:
            continue
        slowest = max(prediction.devices, key=lambda device: device.compute_s + device.constant_s)
        waits = [device.wait_s for device in prediction.devices]
        fullest = max((device.memory_bytes for device in prediction.devices if device.memory_bytes), default=None)
        table.add_row(
            "->" if index == choice.chosen else "" if priced.runnable else "*",
            priced.name,
            f"{priced.rate:.4g}",
            f"{prediction.eta:.2f}",
            f"{1e3 * prediction.step_s:.4g}",
            f"{1e3 * (slowest.compute_s + slowest.constant_s):.4g}",
            f"{1e3 * prediction.comm_s:.3g}",
            f"{1e3 * sum(waits) / len(waits):.3g}",
            "?" if fullest is None else format_bytes(fullest),
        )
    return table


def _remarks(choice: Choice) -> list[str]:
    """What candidates marked with a star lack, and why others cannot be."""
    found = [f"* {one.name}: {one.why_not}" for one in choice.candidates if one.candidate and not one.runnable]
    return found + [f"not possible: {one.name}: {one.why_not}" for one in choice.candidates if not one.candidate]


def _devices(problem: Problem, best: Priced) -> Table:
    table = Table(box=SIMPLE_HEAD, title="Chosen, a step by device (ms)", title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("device", overflow="fold")
    for name in ("samples", "micro-batch", "compute", "other", "wait", "memory", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    candidate, prediction = best.candidate, best.prediction
    assert candidate is not None
    assert prediction is not None
    for part, device in list(zip(candidate.parts, prediction.devices))[:_MOST_DEVICES]:
        table.add_row(*_row(part, device))
    more = len(candidate.parts) - _MOST_DEVICES
    if more > 0:
        table.add_row(f"and {more} more", *[""] * 7)
    for name in candidate.left_out[:_MOST_DEVICES]:
        table.add_row(name, "left out", *[""] * 6)
    if len(candidate.left_out) > _MOST_DEVICES:
        table.add_row(f"and {len(candidate.left_out) - _MOST_DEVICES} more", "left out", *[""] * 6)
    return table


def _row(part: Part, device: DevicePrediction) -> tuple[str, ...]:
    again = " recompute" if part.recompute else ""
    return (
        part.device,
        str(part.samples),
        f"{part.micro_batch}{again}" if part.samples else "-",
        f"{1e3 * device.compute_s:.4g}",
        f"{1e3 * device.constant_s:.3g}",
        f"{1e3 * device.wait_s:.3g}",
        "?" if device.memory_bytes is None else format_bytes(device.memory_bytes),
        "no limit" if device.capacity_bytes is None else format_bytes(device.capacity_bytes),
    )
