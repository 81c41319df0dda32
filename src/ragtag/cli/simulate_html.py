"""A simulated training as one HTML page, with the demo's look: figures, timelines, shares over time, decisions.

The one idea: simulated steps have the form of a real run's reports, so the demo's own timeline draws them.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ragtag.cli.demo_html import MEANING, STYLE
from ragtag.cli.demo_timeline import KINDS, Timeline, timeline
from ragtag.cli.demo_training import Row
from ragtag.sim.result import Simulated

_SHOWN_STEPS = 6
_SHOWN_DECISIONS = 100
_LONGEST_LINE = 600
_SHADES = 12
_ACCENTS = {"ragtag": "busy", "even DDP": "ddp"}


def write_html(path: Path, ways: Sequence[Simulated], source: str) -> None:
    """Write the page; `ways` with ragtag first, `source` names the cluster."""
    path.write_text(_page(ways, source), encoding="utf-8")


def _page(ways: Sequence[Simulated], source: str) -> str:
    ours = ways[0]
    cards = "".join(
        f'<div class="card" style="--accent: var(--{_ACCENTS.get(way.name, "communicating")})">{escape(way.name)}'
        f"<b>{way.samples_per_s:.1f} samples/s</b>{100 * way.eta:.0f} % of the devices' summed speed; "
        f"{way.wasted_device_hours:.2f} of {way.device_hours:.2f} device-hours wasted</div>"
        for way in ways
    )
    legend = "".join(f'<span><i class="{kind}"></i>{MEANING[kind]}</span>' for kind in KINDS)
    drawn = [(way, timeline(_rows(way))) for way in ways if way.last_steps]
    window_s = min((each.duration_s for _, each in drawn), default=0.0)
    panels = "".join(_panel(way, each.last(window_s)) for way, each in drawn)
    pictures = ""
    if panels:
        pictures = (
            f'<h2>What each device does</h2><p class="quiet">The last {window_s:.1f} seconds. A light line ends each '
            f'step.</p><div class="legend">{legend}</div>{panels}'
        )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ragtag simulate: {escape(source)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{ours.wall_s / 3600:.3g} hours on {len(ours.devices)} virtual devices</h1>
<p>Simulated from {escape(source)}: production's controller with a virtual clock. No device computed anything.</p>
<div class="cards">{cards}</div>
{pictures}
<h2>Shares over time</h2>
{_shares(ours)}
<h2>Who came and went</h2>
{_incidents(ours)}
<h2>What ragtag decided, and why</h2>
{_decisions(ours)}
</body>
</html>
"""


def _rows(way: Simulated) -> list[Row]:
    return [
        Row(
            step=step.step,
            loss=0.0,
            wall_s=step.wall_s,
            shares=step.shares,
            compute_s=step.compute_s,
            wait_s=step.wait_s,
            comm_s=step.comm_s,
        )
        for step in way.last_steps[-_SHOWN_STEPS:]
    ]


def _panel(way: Simulated, shown: Timeline) -> str:
    lanes = []
    for rank, device in enumerate(way.devices):
        boxes = "".join(
            f'<i class="{span.kind}" style="left:{100 * span.start_s / shown.duration_s:.3f}%;'
            f'width:{100 * span.duration_s / shown.duration_s:.3f}%" '
            f'title="step {span.step}: {span.kind} {span.duration_s:.3f} s"></i>'
            for span in shown.spans
            if span.device == rank
        )
        ends = "".join(f'<u style="left:{100 * at_s / shown.duration_s:.3f}%"></u>' for at_s in shown.ends_s[:-1])
        waits = shown.total_s(rank, "waiting") / shown.duration_s
        lanes.append(
            f'<div class="device"><span><b>{escape(device.name)}</b></span><div class="lane">{boxes}{ends}</div>'
            f"<span><b>waits {100 * waits:.0f} %</b></span></div>"
        )
    axis = f'<div class="axis"><span>0 s</span><span>{shown.duration_s:.1f} s</span></div>'
    return f'<section class="panel"><h3>{escape(way.name)}</h3>{"".join(lanes)}{axis}</section>'


def _shares(way: Simulated) -> str:
    """Areas one above the other, a device each: who has how much of the batch, and when."""
    if not way.shares:
        return "<p>Not drawn for so many devices.</p>"
    times = [100 * each.at_s / way.wall_s for each in way.shares] + [100.0]
    total = sum(way.shares[0].shares)
    shades = min(_SHADES, len(way.devices))
    polygons = []
    for rank, device in enumerate(way.devices):
        upper, lower = [], []
        for index, each in enumerate(way.shares):
            below = 100 * sum(each.shares[:rank]) / total
            above = below + 100 * each.shares[rank] / total
            for at in (times[index], times[index + 1]):
                upper.append(f"{at:.3f},{100 - above:.3f}")
                lower.append(f"{at:.3f},{100 - below:.3f}")
        opacity = 1 - 0.75 * (rank % shades) / shades
        polygons.append(
            f'<polygon points="{" ".join(upper + lower[::-1])}" style="fill: var(--busy); fill-opacity: {opacity:.2f}; '
            f'stroke: var(--page); stroke-width: .2"><title>{escape(device.name)}</title></polygon>'
        )
    last = way.shares[-1].shares
    names = ", ".join(f"{device.name} {share}" for device, share in zip(way.devices, last))
    return (
        f'<div class="loss"><svg viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(polygons)}</svg></div>'
        f'<div class="axis" style="margin: .2rem 0 0 3rem"><span>0</span><span>{way.wall_s / 60:.1f} min</span></div>'
        f'<p class="quiet">Samples of each batch, from below in the order of the file. At the end: {escape(names)}.</p>'
    )


def _incidents(way: Simulated) -> str:
    if not way.incidents:
        return "<p>Nobody.</p>"
    items = "".join(
        f"<li>{each.at_s / 60:.1f} min: {escape(each.device)} {each.what}; cost everybody {each.lost_s:.1f} s</li>"
        for each in way.incidents[:_SHOWN_DECISIONS]
    )
    return f"<ol>{items}</ol>{_rest(len(way.incidents))}"


def _decisions(way: Simulated) -> str:
    if not way.decisions:
        return "<p>It kept equal shares.</p>"
    items = "".join(
        f"<li>After step {each.step}: {escape(each.reason[:_LONGEST_LINE])}<br>"
        f'<span class="quiet">{escape(each.outcome())}</span></li>'
        for each in way.decisions[:_SHOWN_DECISIONS]
    )
    return f"<ol>{items}</ol>{_rest(len(way.decisions))}"


def _rest(count: int) -> str:
    return f"<p>... and {count - _SHOWN_DECISIONS} more.</p>" if count > _SHOWN_DECISIONS else ""
