"""A run's state as plain numbers and words: what the page and `ragtag watch --json` get.

The one idea: whatever takes thought is done here, once, so that the page, the terminal and other people's tools only
write numbers down. Numbers that the log holds are passed on as they are; nothing known is None.
"""

from typing import Any

from msgspec.structs import asdict

from ragtag.watch.events import Began
from ragtag.watch.islands import IslandsState
from ragtag.watch.state import Device, RunState
from ragtag.watch.timeline import timeline
from ragtag.watch.totals import Totals, sums

SCHEMA = 1
RECENT_STEPS = 50
"""Over how many of the newest steps what is true "now" is averaged."""
_SHOWN = 40
"""Newest decisions, findings, messages and the like."""
_UNNAMED = "run"
"""What a launch calls a run whose user has not named it."""


def drawable(state: RunState) -> dict[str, Any]:
    """Return everything that a view draws; newest first in every list but `devices`, which is in rank order.

    Times are in seconds, memory in bytes, parts (eta, gain, `parts`) in 1.
    """
    began = state.began
    return {
        "schema": SCHEMA,
        "run": {
            "title": _title(began),
            "name": began.run if began else "",
            "script": began.script if began else "",
            "version": began.version if began else "",
            "torch": began.torch if began else "",
            "parameters": began.parameters if began else 0,
            "global_batch_size": began.global_batch_size if began else 0,
            "settings": dict(began.settings) if began else {},
            "began_t": state.first.t if state.first else None,
            "resumed_step": began.step if began else 0,
        },
        "now": _now(state),
        "plan": asdict(state.plan) if state.plan else None,
        "devices": _devices(state),
        "timeline": timeline(state.kept()),
        "curves": {name: _curve(state, name) for name in ("loss", "eta", "evaluations")},
        "decisions": [asdict(each) for each in _newest(state.decisions)],
        "findings": _findings(state),
        "changes": [asdict(each) for each in reversed(state.changes)][:_SHOWN],
        "messages": [asdict(each) for each in reversed(state.messages)][:_SHOWN],
        "evaluation": asdict(state.evaluated) if state.evaluated else None,
        "checkpoint": asdict(state.saved) if state.saved else None,
        "islands": _islands(state.islands),
    }


def _islands(state: IslandsState) -> dict[str, Any] | None:
    """Sites that train side by side; None: there are none."""
    if not state.islands:
        return None
    num_merges, num_fragments = sum(state.rounds.values()), len(state.rounds)
    return {
        "num_merges": num_merges,
        "num_fragments": num_fragments,
        "rounds": num_merges / num_fragments if num_fragments else 0.0,
        "tempo": asdict(state.tempo) if state.tempo else None,
        "islands": [
            {
                "name": each.name,
                "state": each.state,
                "text": each.text,
                "contributions": each.fragments,
                "sent_bytes": each.sent_bytes,
                "compression": each.compression,
                "staleness": each.staleness,
                "late": each.late,
                "weight": each.weight,
                "refused": each.refused,
                "guard": asdict(each.guard) if each.guard else None,
            }
            for each in state.islands.values()
        ],
        "actions": [asdict(each) for each in reversed(state.actions)][:_SHOWN],
        "words": [asdict(each) for each in reversed(state.words)][:_SHOWN],
    }


def _title(began: Began | None) -> str:
    """What people call the run: its name if it was given one, else its script's."""
    if began is None:
        return "a run"
    given = began.run if began.run != _UNNAMED else ""
    return given or began.script.rpartition("/")[2] or "a run"


def _now(state: RunState) -> dict[str, Any]:
    step, recent = state.step, state.steps(RECENT_STEPS)
    recent_s = sum(each.wall_s for each in recent)
    step_s = recent_s / len(recent) if recent else 0.0
    number = step.number if step else state.began.step if state.began else 0
    left = state.last_step - number
    runs = state.ended is None
    return {
        "status": "waiting" if step is None and runs else "running" if runs else "ended",
        "ended": None if state.ended is None else state.ended.reason,
        "t": state.t,
        "step": number,
        "last_step": state.last_step or None,
        "num_steps": state.num_steps,
        "num_skipped": state.num_skipped,
        "samples": state.samples,
        "training_s": state.wall_s,
        "epoch": step.epoch if step else 0,
        "generation": step.generation if step else 0,
        "loss": step.loss if step else None,
        "metrics": dict(step.metrics) if step else {},
        "grad_norm": step.grad_norm if step else None,
        "lr": step.lr if step else None,
        "skipped": step.skipped if step else "",
        "eta": (step.eta or None) if step else None,
        "eta_mean": state.mean_eta or None,
        "step_s": step_s or None,
        "predicted_step_s": (step.predicted_s or None) if step else None,
        "samples_per_s": sum(each.samples for each in recent) / recent_s if recent_s else None,
        "left_s": left * step_s if runs and state.last_step and left >= 0 and step_s else None,
    }


def _devices(state: RunState) -> list[dict[str, Any]]:
    kept = state.kept(RECENT_STEPS)
    recent = [step for step, roster in kept if roster is state.roster]
    recent_s = sum(step.wall_s for step in recent)
    now = sums(recent, len(state.roster)) if recent else []
    totals = state.totals()
    trouble = {each.name: each.text for each in state.findings.values() if not each.over}
    here = [
        _device(device, totals, trouble) | _present(state, rank, now[rank] if now else None, recent_s)
        for rank, device in enumerate(state.roster)
    ]
    gone = [device for device in reversed(state.devices.values()) if device.rank is None][:_SHOWN]
    return here + [_device(device, totals, {}) | _ABSENT for device in gone]


_ABSENT = {"share": None, "planned_share": None, "samples_per_s": None, "speed_samples_per_s": None}


def _device(device: Device, totals: dict[str, Totals], trouble: dict[str, str]) -> dict[str, Any]:
    member, total = device.member, totals[device.member.name]
    return {
        "name": member.name,
        "host": member.host,
        "device": member.device,
        "model": member.model,
        "rank": device.rank,
        "since_step": device.since_step,
        "left": None if device.rank is not None else {"step": device.left_step, "reason": device.reason},
        "parts": _parts(total),
        "totals": {**_times(total), "steps": total.steps, "samples": total.samples},
        "memory_bytes": device.memory_bytes or None,
        "peak_memory_bytes": device.peak_memory_bytes or None,
        "total_memory_bytes": member.memory_bytes or None,
        "temperature_c": device.temperature_c or None,
        "clock_mhz": device.clock_mhz or None,
        "device_busy": device.busy or None,
        "verdict": device.worth and {"gain": device.worth.gain, "text": device.worth.text, "step": device.worth_step},
        "finding": trouble.get(member.name),
    }


def _present(state: RunState, rank: int, now: Totals | None, recent_s: float) -> dict[str, Any]:
    step, plan = state.step, state.plan
    planned = plan.shares[rank] if plan and len(plan.shares) == len(state.roster) else None
    is_current = now is not None and step is not None and rank < len(step.shares)
    found: dict[str, Any] = {
        "share": step.shares[rank] if is_current and step else planned,
        "planned_share": planned,
        "samples_per_s": now.samples / recent_s if now and recent_s else None,
        "speed_samples_per_s": now.samples / now.compute_s if now and now.compute_s else None,
    }
    if now is not None:
        found["parts"] = _parts(now)
    return found


def _times(totals: Totals) -> dict[str, float]:
    return {
        "busy": totals.compute_s + totals.apply_s,
        "waiting": totals.wait_s,
        "communicating": totals.comm_s,
        "data": totals.data_s,
        "stalled": totals.stalled_s,
    }


def _parts(totals: Totals) -> dict[str, float]:
    """What part of its time a device did what; zeros where nothing is known."""
    times = _times(totals)
    whole_s = sum(times.values())
    return {kind: each_s / whole_s if whole_s else 0.0 for kind, each_s in times.items()}


def _curve(state: RunState, name: str) -> dict[str, list[Any]]:
    steps, values = state.curve(name)
    return {"steps": steps, "values": [float(f"{value:.6g}") for value in values]}


def _findings(state: RunState) -> list[dict[str, Any]]:
    """Those that hold first."""
    newest = list(reversed(state.findings.values()))
    found = [each for each in newest if not each.over] + [each for each in newest if each.over]
    return [asdict(each) for each in found[:_SHOWN]]


def _newest(events: dict[Any, Any]) -> list[Any]:
    return list(reversed(events.values()))[:_SHOWN]
