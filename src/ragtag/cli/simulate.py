"""`ragtag simulate`: a cluster file, or one with a profile, trained on in virtual time.

The one idea: the same failures meet every way of training, so the report can say what following speeds is worth here.
"""

import math
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ragtag.cli.plan_match import check_devices
from ragtag.core.cluster_file import load_cluster
from ragtag.core.errors import SettingError, did_you_mean
from ragtag.core.profile import load_profile
from ragtag.core.quantities import parse_bytes
from ragtag.sim.cluster import VirtualCluster, virtual_cluster
from ragtag.sim.membership import Change, failures
from ragtag.sim.result import Simulated
from ragtag.sim.run import Way, simulate

_COMPARED: tuple[Way, ...] = ("ragtag", "even DDP", "dropping stragglers")
_SHOWN_DECISIONS = 12
_SHOWN_DEVICES = 40
_LONGEST_LINE = 200


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for on the command line."""

    cluster: Path
    profile: Path | None = None
    hours: float | None = None
    steps: int | None = None
    batch: int | None = None
    gradient: str | None = None
    failures_per_hour: float = 0.0
    repair_min: float = 10.0
    leave: tuple[str, ...] = ()
    join: tuple[str, ...] = ()
    seed: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `ragtag simulate --json` prints."""

    cluster: str
    global_batch_size: int
    summed_solo_samples_per_s: float
    failures: int
    ways: tuple[Simulated, ...]
    """ragtag first."""


def run_simulate(request: Request, *, html: Path | None, as_json: bool) -> Report:
    """Simulate, print and, with `html`, write a page.

    Raises:
        SettingError: a file or an option is not valid; names it and the fix.
    """
    report = make_report(request)
    if html is not None:
        from ragtag.cli.simulate_html import write_html

        try:
            write_html(html, report.ways, report.cluster)
        except OSError as error:
            raise SettingError(f"--html {html}: {error.strerror}. Name a file that can be written.") from None
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        _show(report, Console(), html)
    return report


def make_report(request: Request) -> Report:
    """Return the same training in each way, under the same luck and the same failures."""
    _check(request)
    described = load_cluster(request.cluster)
    profile = None if request.profile is None else load_profile(request.profile)
    if profile is not None:
        check_devices(profile, request.profile, described, request.cluster)
    cluster = virtual_cluster(
        described,
        profile,
        batch=request.batch,
        gradient_bytes=0 if request.gradient is None else parse_bytes(request.gradient),
        source=str(request.cluster),
    )
    duration_s = 3600 * (request.hours or (1.0 if request.steps is None else math.inf))
    scripted = [_change(text, cluster, joins=False) for text in request.leave]
    scripted += [_change(text, cluster, joins=True) for text in request.join]
    failing = failures(
        cluster.size,
        # A run of a number of steps ends when they are done: no failure is planned beyond a day.
        duration_s=min(duration_s, 86400.0),
        failures_per_hour=request.failures_per_hour,
        repair_s=60 * request.repair_min,
        seed=request.seed,
    )
    # Who comes and goes by script does not fail besides.
    named = {change.rank for change in scripted}
    changes = sorted([*scripted, *(change for change in failing if change.rank not in named)])
    ways = tuple(
        simulate(way, cluster, duration_s=duration_s, steps=request.steps, changes=changes) for way in _COMPARED
    )
    return Report(
        cluster=str(request.cluster),
        global_batch_size=cluster.batch,
        summed_solo_samples_per_s=float(cluster.solo_samples_per_s.sum()),
        failures=sum(incident.what == "leaves" for incident in ways[0].incidents),
        ways=ways,
    )


def _check(request: Request) -> None:
    for name, value, least in (
        ("--hours", request.hours, None),
        ("--batch", request.batch, None),
        ("--failures-per-hour", request.failures_per_hour, 0.0),
        ("--repair-min", request.repair_min, 0.0),
    ):
        if value is None:
            continue
        if not math.isfinite(value) or value < 0 or (least is None and value == 0):
            wanted = "a number above 0" if least is None else "0 or more"
            raise SettingError(f"{name} {value:g} is not valid. Expected {wanted}.")
    if request.gradient is not None and request.profile is not None:
        raise SettingError(
            "--gradient belongs to a simulation without a profile, which knows it. Leave one of them out."
        )


def _change(text: str, cluster: VirtualCluster, *, joins: bool) -> Change:
    option = "--join" if joins else "--leave"
    name, _, minute = text.rpartition("@")
    names = [device.name for device in cluster.devices]
    try:
        at_min = float(minute)
    except ValueError:
        at_min = -1.0
    if not name or not math.isfinite(at_min) or at_min < 0:
        raise SettingError(f"{option} {text} is not valid. Write a device and a minute: {option} {names[-1]}@20.")
    if name not in names:
        raise SettingError(
            f"{option} {text}: there is no device '{name}'.{did_you_mean(name, names)} There are {', '.join(names)}."
        )
    return Change(at_s=60 * at_min, rank=names.index(name), joins=joins)


def _show(report: Report, console: Console, html: Path | None) -> None:
    ours = report.ways[0]
    console.print(_ways(report))
    console.print(_devices(ours))
    for incident in ours.incidents[:_SHOWN_DECISIONS]:
        console.print(
            f"{_clock(incident.at_s)} {incident.device} {incident.what}; cost everybody {incident.lost_s:.1f} s",
            markup=False,
            highlight=False,
        )
    _say_rest(console, len(ours.incidents), "changes of membership")
    for decision in ours.decisions[:_SHOWN_DECISIONS]:
        reason = decision.reason
        if len(reason) > _LONGEST_LINE:
            reason = f"{reason[:_LONGEST_LINE]}..."
        console.print(f"step {decision.step}: {reason}", markup=False, highlight=False)
        console.print(f"   {decision.outcome()}", markup=False, highlight=False)
    _say_rest(console, len(ours.decisions), "decisions")
    if not ours.decisions:
        console.print("ragtag kept equal shares.")
    if html is not None:
        console.print(f"page     {html}", markup=False, highlight=False, soft_wrap=True)


def _say_rest(console: Console, count: int, what: str) -> None:
    if count > _SHOWN_DECISIONS:
        console.print(f"... and {count - _SHOWN_DECISIONS} more {what}; --json has them all")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _ways(report: Report) -> Table:
    ours = report.ways[0]
    title = (
        f"{_clock(ours.wall_s)} of training on {len(ours.devices)} devices, {report.global_batch_size} samples a step, "
        f"{report.failures} times one left"
    )
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("")
    for way in report.ways:
        table.add_column(way.name, justify="right", style="bold" if way is ours else "")
    solo = report.summed_solo_samples_per_s
    table.add_row("samples/s", *(f"{way.samples_per_s:.1f}" for way in report.ways))
    table.add_row(f"eta (1 is {solo:.1f} with all devices)", *(f"{way.eta:.3f}" for way in report.ways))
    table.add_row("steps", *(f"{way.steps:,}" for way in report.ways))
    table.add_row("wasted device-hours", *(f"{_wasted(way)}" for way in report.ways))
    table.add_row("lost by failures", *(f"{way.lost_s:.0f} s" for way in report.ways))
    if ours.price:
        prices = (f"{1e6 * way.price / way.samples:.2f}" if way.samples else "-" for way in report.ways)
        table.add_row("$ per million samples", *prices)
    return table


def _wasted(way: Simulated) -> str:
    part = way.wasted_device_hours / way.device_hours if way.device_hours else 0.0
    return f"{way.wasted_device_hours:.2f} of {way.device_hours:.2f} ({100 * part:.0f} %)"


def _devices(ours: Simulated) -> Table:
    title = "Each device under ragtag"
    if len(ours.devices) > _SHOWN_DEVICES:
        title += f": the first {_SHOWN_DEVICES} of {len(ours.devices)}"
    table = Table(title=title, box=SIMPLE_HEAD)
    for heading in ("device", "alone, samples/s", "samples a step", "computing", "share first", "share last"):
        table.add_column(heading, justify="left" if heading == "device" else "right")
    shares = [ours.shares[0].shares, ours.shares[-1].shares] if ours.shares else []
    for rank, device in enumerate(ours.devices[:_SHOWN_DEVICES]):
        busy = device.busy_s / device.present_s if device.present_s else 0.0
        table.add_row(
            device.name,
            f"{device.solo_samples_per_s:.1f}",
            f"{device.samples / max(ours.steps, 1):.1f}",
            f"{100 * busy:.0f} %",
            *(str(each[rank]) for each in shares),
        )
    return table
