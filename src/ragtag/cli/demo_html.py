"""The demo's result as one HTML file that needs nothing else: no script, no network, dark or light as the reader's
device is, readable on a phone.

The one idea: bars are boxes placed in percent of the window and words are ordinary text, so a narrow screen makes bars
shorter and never letters smaller.
"""

from collections.abc import Sequence
from html import escape
from itertools import accumulate
from pathlib import Path

from ragtag.cli.demo_result import DemoResult, DemoTraining
from ragtag.cli.demo_table import dishonest, outcome
from ragtag.cli.demo_timeline import KINDS, Timeline
from ragtag.cli.demo_training import Row

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #16202e; --quiet: #5c6778; --card: #f3f5f8; --line: #d5dae2;
  --busy: #1f6fd6; --communicating: #f2a900; --lane: #e9ecf1; --wait-a: #fbe3df; --wait-b: #f0a093; --ddp: #d4553f; }
@media (prefers-color-scheme: dark) { :root { --page: #11161d; --text: #e8ecf2; --quiet: #9aa6b6; --card: #1a212b;
  --line: #313b49; --busy: #4d97f3; --communicating: #f5bd3d; --lane: #222b37; --wait-a: #3d2522; --wait-b: #a3523f;
  --ddp: #f08370; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 3rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; }
p { margin: .3rem 0 .8rem; max-width: 46rem; } .quiet { color: var(--quiet); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1rem; margin: 1.4rem 0; }
.card { background: var(--card); border-radius: .7rem; padding: 1rem 1.2rem; border-top: .3rem solid var(--accent); }
.card b { display: block; font-size: 2.2rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .6rem 0 1rem; }
.legend i { display: inline-block; width: 1.6rem; height: .8rem; margin-right: .4rem; border-radius: .15rem; }
.panel { background: var(--card); border-radius: .7rem; padding: .9rem 1.1rem 1rem; margin: .8rem 0; }
.panel h3 { margin: 0 0 .5rem; font-size: 1.05rem; }
.device { display: grid; grid-template-columns: 6.5rem 1fr 6.5rem; gap: .8rem; align-items: center; margin: .4rem 0; }
.device > span { display: flex; flex-wrap: wrap; gap: 0 .5rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.lane { position: relative; height: 2rem; background: var(--lane); border-radius: .2rem; overflow: hidden; }
.lane i { position: absolute; top: 0; bottom: 0; }
.lane u { position: absolute; top: 0; bottom: 0; width: 2px; background: var(--card); }
.busy { background: var(--busy); } .communicating { background: var(--communicating); }
.waiting { background: repeating-linear-gradient(-45deg, var(--wait-a) 0 5px, var(--wait-b) 5px 7px); }
.axis { margin: 0 7.3rem; display: flex; justify-content: space-between; color: var(--quiet);
  font-size: .85rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 9rem; } th { font-weight: 600; }
.loss { position: relative; height: 14rem; margin: .8rem 0 0 3rem; border-left: 1px solid var(--line);
  border-bottom: 1px solid var(--line); }
.loss svg { position: absolute; width: 100%; height: 100%; }
.loss span { position: absolute; font-size: .9rem; line-height: 1; }
.loss .end { top: 30%; bottom: 0; padding-right: .4rem; border-right: 2px dotted; }
polyline { fill: none; stroke-width: 2.5; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
ol { padding-left: 1.2rem; } .warning { border: 2px solid var(--ddp); border-radius: .7rem; padding: .7rem 1rem; }
@media (max-width: 40rem) { .device { grid-template-columns: auto auto; gap: .1rem .8rem; margin: .7rem 0; }
  .device > :last-child { justify-content: end; }
  .lane { grid-row: 2; grid-column: 1 / 3; } .axis { margin: 0; } }
"""
MEANING = {
    "busy": "busy: forward, backward, optimizer",
    "communicating": "communicating",
    "waiting": "waiting for a slower device",
}


def write_html(
    path: Path, result: DemoResult, shown: tuple[Timeline, Timeline], rows: tuple[Sequence[Row], Sequence[Row]]
) -> None:
    """Write the page.

    Args:
        path: the file.
        result: the figures.
        shown: the pieces of both timelines to draw, DDP's first.
        rows: all steps of both, for the loss over time.
    """
    path.write_text(_page(result, shown, rows), encoding="utf-8")


def _page(result: DemoResult, shown: tuple[Timeline, Timeline], rows: tuple[Sequence[Row], Sequence[Row]]) -> str:
    ddp, ours = result.ddp, result.ragtag
    solo = sum(device.solo_samples_per_s for device in result.devices)
    speeds = ", ".join(f"{device.speed:g}" for device in result.devices)
    legend = "".join(f'<span><i class="{kind}"></i>{MEANING[kind]}</span>' for kind in KINDS)
    warning = "" if result.honest else f'<p class="warning">{escape(dishonest(result))}</p>'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ragtag demo: one training on unequal devices, twice</title>
<style>{STYLE}</style>
</head>
<body>
<h1>One training on {len(result.devices)} unequal devices, twice</h1>
<p class="quiet">A byte-level GPT with 1.4 M parameters, {result.steps} steps of {result.global_batch_size} samples, on
devices of speeds {speeds} that one machine pretends to be. Same model, same samples in the same order.</p>
{warning}
<div class="cards">
{_card("Stock DDP, equal batches", ddp, "ddp", f"{100 * ddp.eta:.0f} % of the devices' summed speed ({solo:.1f})")}
{_card("ragtag", ours, "busy", f"{100 * ours.eta:.0f} % of it, {result.speed_up:.2f} times as fast as DDP")}
</div>
<h2>What each device does</h2>
<p class="quiet">The last {shown[0].duration_s:.1f} seconds of both. A light line ends each step.</p>
<div class="legend">{legend}</div>
{_panel("Stock DDP: equal batches, so the slowest device sets the pace", result, ddp, shown[0])}
{_panel("ragtag: every device gets the share it can carry", result, ours, shown[1])}
<h2>The same loss, sooner</h2>
<p class="quiet">Training loss over seconds, all {result.steps} steps of both.</p>
{_losses(rows)}
<h2>The same model</h2>
<p class="quiet">Against the same steps in one process, in fp32, where only the order of additions differs.</p>
<div class="scroll"><table>
<tr><th></th><th>stock DDP</th><th>ragtag</th></tr>
<tr><td>loss at step {result.steps} (one process: {result.one_process_loss:.6f})</td>
<td>{ddp.final_loss:.6f}</td><td>{ours.final_loss:.6f}</td></tr>
<tr><td>largest difference of a step's loss</td>
<td>{ddp.largest_loss_difference:.1e}</td><td>{ours.largest_loss_difference:.1e}</td></tr>
<tr><td>largest difference of parameters, relative, worst tensor</td>
<td>{ddp.largest_parameter_difference:.1e}</td><td>{ours.largest_parameter_difference:.1e}</td></tr>
<tr><td>whole run, the steps in which ragtag found its shares included</td>
<td>{ddp.wall_s:.1f} s</td><td>{ours.wall_s:.1f} s</td></tr>
</table></div>
<h2>The devices</h2>
<p class="quiet">Times are seconds a step, mean over the second half of the run; "alone" is what each device does by
itself.</p>
{_device_table(result)}
<h2>What ragtag decided, and why</h2>
{_decisions(result)}
</body>
</html>
"""


def _card(title: str, training: DemoTraining, accent: str, note: str) -> str:
    return (
        f'<div class="card" style="--accent: var(--{accent})">{escape(title)}'
        f"<b>{training.samples_per_s:.1f} samples/s</b>{escape(note)}</div>"
    )


def _panel(title: str, result: DemoResult, training: DemoTraining, shown: Timeline) -> str:
    parts = [f'<section class="panel"><h3>{escape(title)}</h3>']
    for rank, device in enumerate(result.devices):
        boxes = [
            f'<i class="{span.kind}" style="left:{_percent(span.start_s, shown)};'
            f'width:{_percent(span.duration_s, shown)}" title="step {span.step}: {span.kind} {span.duration_s:.3f} s">'
            "</i>"
            for span in shown.spans
            if span.device == rank
        ]
        ends = [f'<u style="left:{_percent(end_s, shown)}"></u>' for end_s in shown.ends_s[:-1]]
        parts.append(
            f'<div class="device"><span><b>{escape(device.name)}</b> '
            f'<span class="quiet">speed {device.speed:g}</span></span>'
            f'<div class="lane">{"".join(boxes + ends)}</div>'
            f"<span><b>waits {100 * training.wait_part(rank):.0f} %</b> "
            f'<span class="quiet">{training.shares[rank]:.3g} samples</span></span></div>'
        )
    parts.append(f'<div class="axis"><span>0 s</span><span>{shown.duration_s:.1f} s</span></div></section>')
    return "\n".join(parts)


def _percent(seconds: float, shown: Timeline) -> str:
    return f"{100 * seconds / shown.duration_s:.3f}%"


def _losses(rows: tuple[Sequence[Row], Sequence[Row]]) -> str:
    longest_s = max(sum(row.wall_s for row in each) for each in rows)
    losses = [row.loss for each in rows for row in each]
    low, high = min(losses), max(losses)
    lines, ends = [], []
    for name, color, each in (("DDP", "ddp", rows[0]), ("ragtag", "busy", rows[1])):
        times_s = list(accumulate(row.wall_s for row in each))
        points = " ".join(
            f"{100 * time_s / longest_s:.2f},{100 * (high - row.loss) / ((high - low) or 1):.2f}"
            for time_s, row in zip(times_s, each)
        )
        lines.append(f'<polyline points="{points}" style="stroke: var(--{color})"/>')
        right = 100 - 100 * times_s[-1] / longest_s
        ends.append(
            f'<span class="end" style="right:{right:.2f}%; color: var(--{color})"><b>{name}</b> '
            f"{times_s[-1]:.1f} s</span>"
        )
    return (
        f'<div class="loss"><svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{"".join(lines)}'
        f'</svg><span class="quiet" style="right:calc(100% + .5rem); top:0">{high:.2f}</span>'
        f'<span class="quiet" style="right:calc(100% + .5rem); bottom:0">{low:.2f}</span>{"".join(ends)}</div>'
        f'<div class="axis" style="margin: .2rem 0 0 3rem"><span>0 s</span><span>{longest_s:.1f} s</span></div>'
    )


def _device_table(result: DemoResult) -> str:
    head = "".join(f"<th>{name}: share</th><th>busy</th><th>waiting</th>" for name in ("DDP", "ragtag"))
    lines = [f"<tr><th>device</th><th>speed</th><th>alone, samples/s</th>{head}</tr>"]
    for rank, device in enumerate(result.devices):
        cells = "".join(
            f"<td>{each.shares[rank]:.3g}</td><td>{each.busy_s[rank]:.2f}</td><td>{each.wait_s[rank]:.2f}</td>"
            for each in (result.ddp, result.ragtag)
        )
        lines.append(
            f"<tr><td>{escape(device.name)}</td><td>{device.speed:g}</td>"
            f"<td>{device.solo_samples_per_s:.1f}</td>{cells}</tr>"
        )
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _decisions(result: DemoResult) -> str:
    if not result.decisions:
        return "<p>It kept equal shares: the run was too short to know better.</p>"
    items = (
        f"<li>After step {each.step}: {escape(each.reason)}<br>"
        f'<span class="quiet">{escape(outcome(each.predicted_step_s, each.achieved_step_s))}</span></li>'
        for each in result.decisions
    )
    return f"<ol>{''.join(items)}</ol>"
