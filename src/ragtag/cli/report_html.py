"""A finished run as one HTML file that needs nothing else: no script, no network, dark or light, readable on a phone.

The one idea: it draws what the live page draws, from the same numbers, so a report is the page's last word.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ragtag.cli.demo_html import MEANING, STYLE
from ragtag.cli.report_islands import islands_html

_MORE_STYLE = """
:root { --data: #7a5bd0; --stalled: #9a1f1f; }
@media (prefers-color-scheme: dark) { :root { --data: #a48bf0; --stalled: #e06666; } }
.data { background: var(--data); } .stalled { background: var(--stalled); }
.bar { display: flex; height: 1.1rem; min-width: 9rem; border-radius: .2rem; overflow: hidden;
  background: var(--lane); }
.bar i { height: 100%; } .loss span { white-space: nowrap; } td .quiet { white-space: normal; }
.finding { border-left: .3rem solid var(--ddp); padding: .2rem .8rem; margin: .5rem 0; }
.finding.over { border-color: var(--line); color: var(--quiet); }
"""
_MEANING = {**MEANING, "data": "waiting for data", "stalled": "stalled: others did its part"}
_GIB = 1 << 30
_LONGEST = 600


def page(shown: Mapping[str, Any], source: str, note: str = "") -> str:
    """Return the report of what `ragtag.watch.drawable` gave; `source` names the log, `note` what was wrong with it."""
    run, now = shown["run"], shown["now"]
    steps = f"{now['num_steps']:,} steps, {now['samples']:,} samples"
    title = escape(run["script"] or run["name"] or source)
    kinds = shown["timeline"]["kinds"]
    legend = "".join(f'<span><i class="{kind}"></i>{_MEANING[kind]}</span>' for kind in kinds)
    warning = f'<p class="warning">{escape(note)}</p>' if note else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ragtag report: {title}</title>
<style>{STYLE}{_MORE_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p class="quiet">{escape(_summary(shown))}</p>
{warning}
<div class="cards">
{_card("eta, mean of all steps", _percent(now["eta_mean"]), "busy", "of the devices' summed speed")}
{_card("training", _duration(now["training_s"]), "communicating", steps)}
{_card("loss", _number(now["loss"]), "ddp", f"at step {now['step']:,}{_evaluation(shown)}")}
</div>
<h2>Loss</h2>
{_curve(shown["curves"]["loss"], "ddp")}
<h2>eta</h2>
<p class="quiet">What part of the devices' summed speed each step made use of.</p>
{_curve(shown["curves"]["eta"], "busy", ceiling=1.0, scale=100, unit=" %")}
<h2>The devices</h2>
<div class="legend">{legend}</div>
{_devices(shown["devices"], kinds)}
{islands_html(shown["islands"])}
<h2>Who held the others up</h2>
{_findings(shown["findings"])}
<h2>What each device does</h2>
{_timeline(shown["timeline"])}
<h2>What ragtag decided, and why</h2>
{_decisions(shown["decisions"])}
<h2>Who came and went</h2>
{_changes(shown["changes"])}
<h2>What was said</h2>
{_messages(shown["messages"])}
</body>
</html>
"""


def _summary(shown: Mapping[str, Any]) -> str:
    run, now = shown["run"], shown["now"]
    parts = (
        [f"{run['parameters']:,} parameters, {run['global_batch_size']} samples a step"] if run["parameters"] else []
    )
    if run["version"]:
        parts.append(f"ragtag {run['version']}, torch {run['torch']}")
    if now["status"] == "ended":
        parts.append(f"ended at step {now['step']:,}" + (f": {now['ended']}" if now["ended"] else ""))
    else:
        parts.append(f"the log ends at step {now['step']:,} without an end of the run")
    return "; ".join(parts) + "."


def _card(title: str, value: str, accent: str, note: str) -> str:
    return f'<div class="card" style="--accent: var(--{accent})">{title}<b>{value}</b>{escape(note)}</div>'


def _evaluation(shown: Mapping[str, Any]) -> str:
    evaluation = shown["evaluation"]
    return f"; evaluated {_number(evaluation['value'])} at step {evaluation['step']:,}" if evaluation else ""


def _curve(
    curve: Mapping[str, Sequence[float]], colour: str, *, ceiling: float | None = None, scale: float = 1, unit: str = ""
) -> str:
    steps, values = curve["steps"], curve["values"]
    if len(steps) < 2:
        return "<p>Too few steps to draw.</p>"
    low, high = (0.0, ceiling or 1.0) if ceiling else (min(values), max(values))
    high = max(high, max(values))
    height, width = (high - low) or 1.0, (steps[-1] - steps[0]) or 1
    points = " ".join(
        f"{100 * (step - steps[0]) / width:.2f},{100 - 96 * (value - low) / height - 2:.2f}"
        for step, value in zip(steps, values)
    )
    return (
        f'<div class="loss"><svg viewBox="0 0 100 100" preserveAspectRatio="none">'
        f'<polyline points="{points}" style="stroke: var(--{colour})"/></svg>'
        f'<span style="right:100%;top:0;margin-right:.4rem">{_number(scale * high)}{unit}</span>'
        f'<span style="right:100%;bottom:0;margin-right:.4rem">{_number(scale * low)}{unit}</span></div>'
        f'<div class="axis" style="margin: .2rem 0 0 3rem"><span>step {steps[0]:,}</span>'
        f"<span>{steps[-1]:,}</span></div>"
    )


def _devices(devices: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> str:
    rows = []
    for device in devices:
        bar = "".join(
            f'<i class="{kind}" style="width:{100 * device["parts"][kind]:.2f}%" '
            f'title="{kind} {100 * device["parts"][kind]:.1f} %"></i>'
            for kind in kinds
        )
        busy = 100 * device["parts"]["busy"]
        verdict = device["verdict"]
        if device["left"] is None:
            said = escape(verdict["text"]) if verdict else ""
        else:
            said = escape(f"left after step {device['left']['step']:,}")
        memory = device["peak_memory_bytes"] or device["memory_bytes"]
        rows.append(
            f'<tr data-device="{escape(device["name"])}"><td><b>{escape(device["name"])}</b><br>'
            f'<span class="quiet">{escape(device["host"])} {escape(device["model"])}</span></td>'
            f'<td>{_number(device["share"])}</td><td><div class="bar">{bar}</div></td><td>{busy:.0f} %</td>'
            f"<td>{_number(device['samples_per_s'])}</td><td>{device['totals']['samples']:,}</td>"
            f"<td>{f'{memory / _GIB:.2f} GiB' if memory else ''}</td><td>{said}</td></tr>"
        )
    head = "".join(
        f"<th>{name}</th>" for name in ("", "share", "time", "busy", "samples/s", "samples", "memory", "verdict")
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _findings(findings: Sequence[Mapping[str, Any]]) -> str:
    if not findings:
        return "<p>Nobody.</p>"
    items = []
    for each in findings:
        kind, when = "finding", f"since step {each['since_step']:,}"
        if each["over"]:
            kind, when = "finding over", f"{when}, over since step {each['step']:,}"
        text = escape(each["text"][:_LONGEST])
        items.append(f'<p class="{kind}"><b>{escape(each["cause"])}</b>, {when}: {text}</p>')
    return "".join(items)


def _timeline(timeline: Mapping[str, Any]) -> str:
    length_s = timeline["duration_s"]
    if not length_s:
        return "<p>No step is in the log.</p>"
    kinds = timeline["kinds"]
    lanes = []
    ends = "".join(f'<u style="left:{100 * at_s / length_s:.3f}%"></u>' for at_s in timeline["ends_s"][:-1])
    for number, name in enumerate(timeline["devices"]):
        boxes = "".join(
            f'<i class="{kinds[kind]}" style="left:{100 * start_s / length_s:.3f}%;'
            f'width:{100 * (stop_s - start_s) / length_s:.3f}%" title="{kinds[kind]} {stop_s - start_s:.3f} s"></i>'
            for device, kind, start_s, stop_s in timeline["spans"]
            if device == number
        )
        lanes.append(
            f'<div class="device"><span><b>{escape(name)}</b></span><div class="lane">{boxes}{ends}</div>'
            f"<span></span></div>"
        )
    return (
        f'<p class="quiet">Steps {timeline["first_step"]:,} to {timeline["last_step"]:,}. A light line ends each.</p>'
        f'<section class="panel">{"".join(lanes)}<div class="axis"><span>0 s</span><span>{length_s:.2f} s</span></div>'
        f"</section>"
    )


def _decisions(decisions: Sequence[Mapping[str, Any]]) -> str:
    if not decisions:
        return "<p>Nothing: the first shares stayed.</p>"
    items = []
    for each in reversed(decisions):
        predicted, achieved = each.get("predicted_step_s") or 0, each.get("achieved_step_s")
        came = f"predicted {predicted:.3g} s" if predicted else "nothing predicted"
        came += f", achieved {achieved:.3g} s" if achieved is not None else ", not measured"
        items.append(
            f"<li>After step {each['step']:,}: {escape(each['reason'][:_LONGEST])}<br>"
            f'<span class="quiet">{escape(came)}</span></li>'
        )
    return f"<ol>{''.join(items)}</ol>"


def _changes(changes: Sequence[Mapping[str, Any]]) -> str:
    if not changes:
        return "<p>Nobody.</p>"
    items = "".join(
        f"<li>After step {each['step']:,}: {escape(each['name'])} {'has joined' if each['joined'] else 'has left'}"
        f"{escape(': ' + each['reason'][:_LONGEST]) if each.get('reason') and not each['joined'] else ''}</li>"
        for each in reversed(changes)
    )
    return f"<ol>{items}</ol>"


def _messages(messages: Sequence[Mapping[str, Any]]) -> str:
    if not messages:
        return "<p>Nothing.</p>"
    items = "".join(
        f"<li>{escape(each['source'] + ': ' if each.get('source') else '')}{escape(each['text'][:_LONGEST])}</li>"
        for each in reversed(messages)
    )
    return f"<ol>{items}</ol>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _percent(part: float | None) -> str:
    return "not known" if not part else f"{100 * part:.1f} %"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
