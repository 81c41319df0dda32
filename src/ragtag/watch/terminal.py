"""A run's drawable state as one screen of a terminal, 80 columns or more.

The one idea: a frame is made anew from plain numbers for whatever size the terminal has now, and says in characters
what it says in colours, so that it can be read without them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ragtag.core.quantities import format_bytes
from ragtag.watch.words import digits, duration, percent, sparkline

Drawn = Mapping[str, Any]

_KINDS = {  # style, character, and one where there is only ASCII
    "busy": ("blue", "█", "#"),
    "waiting": ("red", "░", "."),
    "communicating": ("yellow", "▓", "="),
    "data": ("magenta", "▒", "~"),
    "stalled": ("white", "×", "x"),
}
_QUIET = "bright_black"
_FIXED_LINES = 11
"""Lines of a frame without its devices, decisions, findings and messages."""


class Frame:
    """Renders `drawn`; `quiet_s` is how long ago the log was last written to, `height` the most lines, 0: any."""

    def __init__(self, drawn: Drawn, *, quiet_s: float | None = None, height: int = 0) -> None:
        self._drawn, self._quiet_s, self._height = drawn, quiet_s, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the parts that fit."""
        plain = not options.encoding.lower().startswith("utf")
        width = options.max_width
        findings = [each for each in self._drawn["findings"] if not each["over"]]
        room = (self._height or 1_000_000) - _FIXED_LINES - 2 * len(findings[:3])
        devices = _rows(self._drawn["devices"], room)
        room -= len(devices) + (len(devices) < len(self._drawn["devices"]))
        yield _head(self._drawn, self._quiet_s, width)
        yield _curves(self._drawn, width, plain)
        yield Text()
        yield _devices(self._drawn, devices, width, plain)
        if len(devices) < len(self._drawn["devices"]):
            yield Text(f"and {len(self._drawn['devices']) - len(devices)} more", style=_QUIET)
        yield _legend(plain)
        for each in findings[:3]:
            yield _text(f"! {each['text']}", "red")
        yield from _last_words(self._drawn, room, width)


def status(drawn: Drawn, quiet_s: float | None) -> tuple[str, str]:
    """Return how the run is, and the style of these words."""
    now = drawn["now"]
    if now["status"] == "ended":
        return (f"ended: {now['ended']}", "red") if now["ended"] else ("ended", _QUIET)
    if quiet_s is not None and quiet_s > max(20.0, 5 * (now["step_s"] or 0.0)):
        return f"nothing new for {duration(quiet_s)}", "red"
    return ("waiting for the first step", _QUIET) if now["status"] == "waiting" else ("training", "green")


def _head(drawn: Drawn, quiet_s: float | None, width: int) -> Text:
    run, now = drawn["run"], drawn["now"]
    words, style = status(drawn, quiet_s)
    head = _text(run["title"], "bold")
    head.append_text(_text(f"  {words}", style))
    head.append(f"  step {now['step']}" + (f" of {now['last_step']}" if now["last_step"] else ""), style="not bold")
    if now["left_s"] is not None:
        head.append(f"  {duration(now['left_s'])} left", style="not bold")
    head.truncate(width, overflow="ellipsis")
    return head


def _curves(drawn: Drawn, width: int, plain: bool) -> Table:
    now, curves = drawn["now"], drawn["curves"]
    speed = f"{digits(now['samples_per_s'])} samples/s, {duration(now['step_s'])} a step"
    if now["predicted_step_s"] is not None:
        speed += f" ({duration(now['predicted_step_s'])} predicted)"
    evaluation = drawn["evaluation"]
    loss = Text(digits(now["loss"], 4))
    if evaluation is not None:
        loss.append(f"  evaluated {digits(evaluation['value'], 4)}", style=_QUIET)
    eta = Text(percent(now["eta"])).append(f"  mean {percent(now['eta_mean'])}", style=_QUIET)
    levels = ".:-=+*#@" if plain else "▁▂▃▄▅▆▇█"
    room = max(10, min(50, width - 46))
    table = Table.grid(padding=(0, 2))
    table.add_row("loss", loss, Text(sparkline(curves["loss"]["values"], room, levels=levels), style="blue"))
    table.add_row("eta", eta, Text(sparkline(curves["eta"]["values"], room, levels=levels), style="green"))
    lines = Table.grid()
    lines.add_row(table)
    lines.add_row(f"speed {speed}")
    return lines


def _rows(devices: Sequence[Mapping[str, Any]], room: int) -> Sequence[Mapping[str, Any]]:
    """Return the devices that are shown: all, or the first that fit."""
    return devices if len(devices) <= max(3, room) else devices[: max(3, room - 1)]


def _devices(drawn: Drawn, devices: Sequence[Mapping[str, Any]], width: int, plain: bool) -> Table:
    is_wide = width >= 104
    conditions = [_condition(device, is_wide) for device in devices]
    knows_condition, knows_memory = any(conditions), any(device["memory_bytes"] for device in devices)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=_QUIET, width=width, expand=True)
    table.add_column("device", no_wrap=True, max_width=24 if is_wide else 12)
    table.add_column("host", no_wrap=True, max_width=16 if is_wide else 8)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("its time", no_wrap=True, ratio=1)
    table.add_column("sampl/s", justify="right", no_wrap=True)
    if knows_memory:
        table.add_column("memory", justify="right", no_wrap=True)
    if knows_condition:
        table.add_column("state", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True, max_width=24 if is_wide else 12)
    for device, condition in zip(devices, conditions):
        cells: list[Text | str] = [
            _text(device["name"]),
            _text(device["host"]),
            digits(device["share"]),
            "" if device["left"] else _Bar(device["parts"], plain),  # type: ignore[list-item]
            digits(device["samples_per_s"]),
        ]
        if knows_memory:
            used = device["peak_memory_bytes"] or device["memory_bytes"]
            cells.append(format_bytes(used) if used else "–")
        if knows_condition:
            cells.append(condition or "–")
        cells.append(_verdict(device))
        table.add_row(*cells, style=_QUIET if device["left"] else "")
    return table


class _Bar:
    """As long as there is room: how a device spent its time."""

    def __init__(self, parts: Mapping[str, float], plain: bool) -> None:
        self._parts, self._plain = parts, plain

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one line."""
        width = max(4, options.max_width - 5)
        bar, done, at = Text(no_wrap=True), 0.0, 0
        for kind, part in self._parts.items():
            done += part
            style, character, ascii_character = _KINDS[kind]
            end = round(done * width)
            bar.append((ascii_character if self._plain else character) * (end - at), style=style)
            at = end
        bar.append(" " * (width - at) + f"{100 * self._parts['busy']:4.0f}%")
        yield bar

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Take what is there."""
        return Measurement(12, options.max_width)


def _condition(device: Mapping[str, Any], is_wide: bool) -> str:
    found = [f"{device['temperature_c']:.0f}°C"] if device["temperature_c"] else []
    if is_wide and device["clock_mhz"]:
        found.append(f"{device['clock_mhz']:.0f} MHz")
    return " ".join(found)


def _verdict(device: Mapping[str, Any]) -> Text:
    if device["left"] is not None:
        return Text("gone")
    verdict = device["verdict"]
    if verdict is None:
        return Text("–")
    gain = verdict["gain"]
    return _text(verdict["text"], "green" if gain > 0.005 else "red" if gain < -0.005 else "")


def _legend(plain: bool) -> Text:
    legend = Text(no_wrap=True)
    for kind, (style, character, ascii_character) in _KINDS.items():
        legend.append(ascii_character if plain else character, style=style).append(f" {kind}  ", style=_QUIET)
    return legend


def _last_words(drawn: Drawn, room: int, width: int) -> RenderResult:
    """Yield the newest decisions, and what else was said, in at most `room` lines."""
    shown: list[Text] = []
    for each in drawn["decisions"][:3]:
        outcome = f"predicted {duration(each['predicted_step_s'])} a step" if each["predicted_step_s"] else ""
        if each["achieved_step_s"] is not None:
            outcome += f", achieved {duration(each['achieved_step_s'])}"
        line = _text(f"step {each['step']}: {each['reason']}")
        shown.append(line.append(f"  {outcome}" if outcome else "", style=_QUIET))
    for each in drawn["changes"][:3]:
        how = "has joined" if each["joined"] else "is gone"
        why = f": {each['reason']}" if each["reason"] else ""
        shown.append(_text(f"step {each['step']}: {each['name']} {how}{why}"))
    for each in [each for each in drawn["findings"] if each["over"]][:3]:
        shown.append(_text(f"step {each['step']}: over: {each['text']}"))
    for each in drawn["messages"][:3]:
        style = "" if each["level"] == "info" else "red"
        shown.append(_text(f"{each['source']}: {each['text']}" if each["source"] else each["text"], style))
    if shown and room > 1:
        yield Text()
        room -= 1
    for line in shown:
        num_lines = -(-line.cell_len // width) or 1
        if num_lines > room:
            return
        room -= num_lines
        yield line


def _text(words: str, style: str = "") -> Text:
    """Return what another machine has said without what would command this terminal."""
    return Text("".join([letter if letter.isprintable() else " " for letter in words]), style=style)
