"""`ragtag report`: a run's event log as a page, a trace, or one JSON object.

The one idea: one pass over the log, whatever is asked for, in memory that does not grow with it.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ragtag.cli.report_html import page
from ragtag.cli.run_directory import LOG_NAME
from ragtag.core.errors import SettingError
from ragtag.core.one_go import write_in_one_go
from ragtag.watch.drawable import drawable
from ragtag.watch.events import AnyEvent
from ragtag.watch.reader import Decoder, parts_of, read
from ragtag.watch.state import RunState
from ragtag.watch.trace import write_trace

_BATCH = 10_000


def run_report(log: Path, *, output: Path | None, trace: Path | None, as_json: bool) -> None:
    """Read the log, or that of a run's directory, and write what is asked for.

    Raises:
        DocumentError: there is no log, or it cannot be read.
        SettingError: a file cannot be written.
    """
    path = log / LOG_NAME if log.is_dir() else log
    decoder, state = Decoder(), RunState()
    events = _told(_shown(read(path, decoder), path), state)
    if trace is not None:
        try:
            with open(trace, "wb") as out:
                num_slices = write_trace(events, out)
        except OSError as error:
            raise SettingError(f"--trace {trace}: {error.strerror}.") from None
        print(f"{trace}: {num_slices:,} slices; open it at https://ui.perfetto.dev", file=sys.stderr)
    else:
        for _ in events:
            pass
    shown = drawable(state)
    if as_json:
        print(json.dumps(shown))
    if output is None and (as_json or trace is not None):
        return
    target = output or path.parent / "report.html"
    note = f"{decoder.skipped} lines of the log were damaged and are left out." if decoder.skipped else ""
    try:
        write_in_one_go(target, page(shown, str(path), note).encode())
    except OSError as error:
        raise SettingError(
            f"The report {target} cannot be written: {error.strerror}. Name a place: --output."
        ) from None
    print(f"{target}: {shown['now']['num_steps']:,} steps", file=sys.stderr)


def _told(events: Iterator[AnyEvent], state: RunState) -> Iterator[AnyEvent]:
    for event in events:
        state.apply(event)
        yield event


def _shown(events: Iterator[AnyEvent], path: Path) -> Iterator[AnyEvent]:
    """Pass events on, with a progress bar on a terminal."""
    total = sum(part.stat().st_size for part in parts_of(path))
    console = Console(stderr=True)
    if not console.is_terminal or total < (64 << 20):
        yield from events
        return
    with Progress(
        TextColumn("reading"),
        BarColumn(),
        TextColumn("{task.completed:,} events"),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("reading", total=None)
        for number, event in enumerate(events):
            if number % _BATCH == 0:
                progress.update(task, completed=number)
            yield event
