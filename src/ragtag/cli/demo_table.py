"""The demo's result as tables for a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ragtag.cli.demo_result import DemoResult, DemoTraining


def show(result: DemoResult, console: Console) -> None:
    """Print figures, devices, decisions, and where the pictures are."""
    console.print(_figures(result))
    console.print(_devices(result))
    console.print()
    for decision in result.decisions:
        console.print(f"step {decision.step}: {decision.reason}", markup=False, highlight=False)
        console.print(f"   {outcome(decision.predicted_step_s, decision.achieved_step_s)}", highlight=False)
    if not result.decisions:
        console.print("ragtag kept equal shares: the run was too short to know better.")
    if not result.honest:
        console.print(f"[bold red]{dishonest(result)}[/]")
    console.print()
    for kind, path in result.files.items():
        console.print(f"{kind:8} {path}", markup=False, highlight=False, soft_wrap=True)


def outcome(predicted_s: float, achieved_s: float | None) -> str:
    """Return prediction and achievement of a decision in words."""
    achieved = "not measured yet" if achieved_s is None else f"achieved {achieved_s:.3g} s"
    return f"a step: predicted {predicted_s:.3g} s, {achieved}"


def dishonest(result: DemoResult) -> str:
    """Return what to think of the figures when the pace was not kept."""
    errors = " and ".join(f"{100 * each.pace_error:.1f} % ({each.name})" for each in (result.ddp, result.ragtag))
    return (
        "This machine was too busy: real work did not always fit into the pretended devices' pace. Compute took "
        f"up to {errors} more or less than such devices would take. Run the demo again while nothing else runs."
    )


def _figures(result: DemoResult) -> Table:
    ddp, ours = result.ddp, result.ragtag
    title = f"{result.steps} steps of {result.global_batch_size} samples on {len(result.devices)} devices"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("")
    table.add_column("stock DDP, equal batches", justify="right")
    table.add_column("ragtag", justify="right", style="bold")
    solo = sum(device.solo_samples_per_s for device in result.devices)

    def row(title: str, of_ddp: str, of_ours: str) -> None:
        table.add_row(title, of_ddp, of_ours)

    row("samples/s, second half", f"{ddp.samples_per_s:.1f}", f"{ours.samples_per_s:.1f}")
    row(f"eta (1 is {solo:.1f}, the devices' own)", f"{ddp.eta:.3f}", f"{ours.eta:.3f}")
    row("speed-up", "1", f"{result.speed_up:.2f}")
    row("whole run, finding shares included", f"{ddp.wall_s:.1f} s", f"{ours.wall_s:.1f} s")
    row("speed-up of the whole run", "1", f"{result.speed_up_overall:.2f}")
    table.add_section()
    row(f"loss at step {result.steps}", f"{ddp.final_loss:.6f}", f"{ours.final_loss:.6f}")
    row("against one process of the same seed:", f"{result.one_process_loss:.6f}", f"{result.one_process_loss:.6f}")
    row("   largest difference of a loss", *_scientific(ddp, ours, "largest_loss_difference"))
    row("   of parameters (relative)", *_scientific(ddp, ours, "largest_parameter_difference"))
    return table


def _scientific(ddp: DemoTraining, ours: DemoTraining, name: str) -> tuple[str, str]:
    return f"{getattr(ddp, name):.1e}", f"{getattr(ours, name):.1e}"


def _devices(result: DemoResult) -> Table:
    table = Table(title="Each device, seconds a step over the second half", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for heading in ("\ndevice", "\nspeed", "alone,\n/s"):
        table.add_column(heading, justify="left" if "device" in heading else "right", no_wrap=True)
    for name, style in (("DDP", ""), ("ragtag", "bold")):
        for heading in (f"{name}:\nshare", "\nbusy", "\nwaiting"):
            table.add_column(heading, justify="right", no_wrap=True, style=style)
    for rank, device in enumerate(result.devices):
        cells = []
        for training in (result.ddp, result.ragtag):
            waiting = f"{training.wait_s[rank]:.2f} ({100 * training.wait_part(rank):.0f}%)"
            cells += [f"{training.shares[rank]:.3g}", f"{training.busy_s[rank]:.2f}", waiting]
        table.add_row(device.name, f"{device.speed:g}", f"{device.solo_samples_per_s:.1f}", *cells)
    return table
