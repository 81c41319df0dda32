"""An event log as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open: a track for each device.

The one idea: events become slices as they are read and are written at once, so a log of any length becomes a trace in
bounded memory. Times within a step are laid out as in the page: update, data, work, waiting, communication.
Format: Trace Event Format (Google), JSON array form.
"""

from collections.abc import Iterable
from typing import Any, BinaryIO

import msgspec

from ragtag.watch.events import AnyEvent, Decided, Finding, Member, Members, Saved, Step
from ragtag.watch.timeline import KINDS, pieces

_MICROS = 1e6
_PROCESS = 1


def write_trace(events: Iterable[AnyEvent], out: BinaryIO) -> int:
    """Write the trace of `events` to `out`; return how many slices it has."""
    encoder = msgspec.json.Encoder()
    tracks: dict[str, int] = {}
    ranks: tuple[Member, ...] = ()
    end_s = num_slices = 0.0
    out.write(b'[\n{"ph":"M","pid":1,"tid":0,"name":"process_name","args":{"name":"ragtag"}}')

    def put(**fields: Any) -> None:
        out.write(b",\n" + encoder.encode({"pid": _PROCESS, **fields}))

    for event in events:
        if isinstance(event, Members):
            ranks = event.ranks
            for member in ranks:
                if member.name not in tracks:
                    tracks[member.name] = track = len(tracks) + 1
                    label = f"{member.name} ({member.host})" if member.host else member.name
                    put(ph="M", tid=track, name="thread_name", args={"name": label})
                    put(ph="M", tid=track, name="thread_sort_index", args={"sort_index": track})
            put(ph="i", s="p", tid=0, ts=event.t * _MICROS, name=f"{len(ranks)} ranks train", args={"step": event.step})
        elif isinstance(event, Step):
            # Steps follow each other, and are told a moment after they ended.
            begin_s = max(event.t - event.wall_s, end_s)
            end_s = begin_s + event.wall_s
            for rank, member in enumerate(ranks):
                at_s = begin_s
                for kind, duration_s in pieces(event, rank):
                    stop_s = min(at_s + duration_s, end_s)
                    if stop_s > at_s:
                        put(
                            ph="X",
                            tid=tracks[member.name],
                            ts=round(at_s * _MICROS, 1),
                            dur=round((stop_s - at_s) * _MICROS, 1),
                            name=KINDS[kind],
                            args={"step": event.number},
                        )
                        num_slices += 1
                        at_s = stop_s
            put(ph="C", tid=0, ts=round(end_s * _MICROS, 1), name="loss", args={"loss": event.loss})
            if event.eta:
                put(ph="C", tid=0, ts=round(end_s * _MICROS, 1), name="eta", args={"eta": event.eta})
        elif isinstance(event, Decided):
            if event.achieved_step_s is None:
                put(ph="i", s="p", tid=0, ts=event.t * _MICROS, name=event.decided, args={"reason": event.reason})
        elif isinstance(event, Finding) and event.name in tracks:
            name = f"{event.cause}{' is over' if event.over else ''}"
            put(ph="i", s="t", tid=tracks[event.name], ts=event.t * _MICROS, name=name, args={"text": event.text})
        elif isinstance(event, Saved):
            put(ph="i", s="p", tid=0, ts=event.t * _MICROS, name="checkpoint", args={"path": event.path})
    out.write(b"\n]\n")
    return int(num_slices)
