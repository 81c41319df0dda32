"""The log of a run that never was: the same events each time, so that what a view shows can be compared with them.

Four devices on two hosts; one has a slow loader for a while, one stalls for a step, one leaves and another one joins.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ragtag.watch.events import (
    AnyEvent,
    Began,
    Decided,
    Ended,
    Evaluated,
    Finding,
    Left,
    Looped,
    Member,
    Members,
    Planned,
    Said,
    Saved,
    Step,
    Verdict,
    Vitals,
    Worth,
)

BATCH = 64
BEGINS_T = 1_790_000_000.0
DESK_0 = Member(name="desk/0", host="desk", device="cuda:0", model="NVIDIA GeForce RTX 3090", memory_bytes=24 << 30)
DESK_1 = Member(name="desk/1", host="desk", device="cuda:1", model="NVIDIA GeForce RTX 3060", memory_bytes=12 << 30)
NOOK_0 = Member(name="nook/0", host="nook", device="cuda:0", model="NVIDIA GeForce GTX 1070", memory_bytes=8 << 30)
NOOK_1 = Member(name="nook/1", host="nook", device="cpu", model="AMD Ryzen 5 2600", memory_bytes=16 << 30)
NOOK_2 = Member(name="nook/2", host="nook", device="cpu", model="AMD Ryzen 5 2600", memory_bytes=16 << 30)
SPEEDS = {"desk/0": 160.0, "desk/1": 120.0, "nook/0": 60.0, "nook/1": 20.0, "nook/2": 30.0}
"""Samples a second."""
FIRST, SECOND, THIRD = (DESK_0, DESK_1, NOOK_0, NOOK_1), (DESK_0, DESK_1, NOOK_0), (DESK_0, DESK_1, NOOK_0, NOOK_2)
DECIDES, SLOW_FROM, SLOW_TO, STALLS, LEAVES, JOINS, EVALUATES = 10, 30, 44, 55, 60, 75, 25
"""Steps."""


def events(steps: int = 100, *, ended: bool = False) -> list[AnyEvent]:
    """Return the events of the first `steps` steps of a run that is to have 200."""
    t = BEGINS_T
    found: list[AnyEvent] = [
        Began(
            t=t,
            run="blue-otter",
            script="examples/byte_gpt.py",
            version="0.1.0",
            torch="2.13.0",
            global_batch_size=BATCH,
            parameters=1_400_000,
            settings={"precision": "bf16", "accumulate": 1},
        ),
        Members(t=t, step=0, ranks=FIRST),
        _planned(t, 0, "equal00", (16, 16, 16, 16), "equal shares: no speed is known yet"),
        Looped(t=t, step=0, last=200),
        Said(t=t, text="the hub listens on 192.168.1.7:29400", source="hub"),
    ]
    members, shares, plan = FIRST, (16, 16, 16, 16), "equal00"
    for number in range(1, steps + 1):
        if number == LEAVES + 1:
            members, shares, plan = SECOND, (30, 23, 11), "three00"
            gone = Left(name="nook/1", host="nook", reason="no sign of life for 10 s")
            found.append(Members(t=t, step=LEAVES, generation=1, ranks=SECOND, left=(gone,)))
            found.append(_planned(t, LEAVES, plan, shares, "nook/1 is gone; its share goes to the others by speed"))
        if number == JOINS + 1:
            members, shares, plan = THIRD, (28, 21, 10, 5), "four000"
            found.append(Members(t=t, step=JOINS, generation=2, ranks=THIRD, joined=("nook/2",)))
            found.append(_planned(t, JOINS, plan, shares, "nook/2 has joined; shares by its measured speed"))
        step = _step(number, members, shares, plan)
        t = round(t + step.wall_s, 3)
        found.append(msgspec.structs.replace(step, t=t))
        if number == DECIDES:
            shares, plan = (28, 21, 11, 4), "bysped0"
            decided = Decided(
                t=t,
                step=DECIDES,
                decided="shares",
                reason="nook/1 is 8.0 times slower than desk/0 and held the others up; shares now follow speed",
                predicted_gain=0.74,
                predicted_step_s=0.205,
            )
            found.append(decided)
            found.append(_planned(t, DECIDES, plan, shares, "shares follow measured speeds"))
        if number == DECIDES + 10:
            achieved = {"achieved_step_s": 0.2135, "achieved_over": 10}
            found.append(msgspec.structs.replace(decided, t=t, **achieved))
        if number in (SLOW_FROM + 5, SLOW_TO + 5):
            found.append(_finding(t, number, over=number > SLOW_TO))
        if number % 10 == 0:
            found.append(_vitals(t, number, members))
        if number % 20 == 0:
            found.append(_verdict(t, number, members))
        if number % EVALUATES == 0:
            loss = round(_loss(number) + 0.02, 5)
            found.append(Evaluated(t=t, step=number, value=loss, metrics={"accuracy": round(1 - loss / 6, 5)}))
        if number % 50 == 0:
            found.append(Saved(t=t, step=number, path=f"runs/blue-otter/step-{number}", took_s=0.31))
        if number == STALLS:
            said = "nook/0 stalled in step 55; the others computed its samples"
            found.append(Said(t=t, level="warning", text=said, source="desk/0"))
    if ended:
        found.append(Ended(t=t, step=steps))
    return found


def append(path: Path, some: Sequence[AnyEvent]) -> None:
    """Write them to the end of the log at `path`."""
    with open(path, "ab") as file:
        file.write(b"".join(msgspec.json.encode(event) + b"\n" for event in some))


def _step(number: int, members: Sequence[Member], shares: tuple[int, ...], plan: str) -> Step:
    compute_s, data_s, apply_s = [], [], []
    stalled = tuple(rank for rank, member in enumerate(members) if number == STALLS and member is NOOK_0)
    for rank, (member, share) in enumerate(zip(members, shares)):
        wobble = 1 + 0.03 * math.sin(1.7 * number + 2.1 * rank)
        slow_s = 0.085 if member is DESK_1 and SLOW_FROM <= number <= SLOW_TO else 0.0
        compute_s.append(0.0 if rank in stalled else share / SPEEDS[member.name] * wobble)
        data_s.append(0.0 if rank in stalled else 0.004 + slow_s)
        apply_s.append(0.003 + 0.001 * rank)
    comm_s = 0.012
    done_s = [sum(each) for each in zip(compute_s, data_s, apply_s)]
    longest_s = max(done_s)
    wait_s = [0.0 if rank in stalled else longest_s - each for rank, each in enumerate(done_s)]
    wall_s = longest_s + comm_s
    speed = sum(SPEEDS[member.name] for member in members)
    return Step(
        number=number,
        loss=_loss(number),
        metrics={"perplexity": round(math.exp(_loss(number)), 3)},
        grad_norm=round(1.2 + 0.3 * math.cos(number), 5),
        lr=0.001,
        samples=BATCH,
        weight=float(BATCH),
        wall_s=round(wall_s, 6),
        predicted_s=0.0 if number <= DECIDES else 0.21,
        eta=round(BATCH / wall_s / speed, 5),
        shares=tuple(0 if rank in stalled else share for rank, share in enumerate(shares)),
        compute_s=_micros(compute_s),
        data_s=_micros(data_s),
        wait_s=_micros(wait_s),
        apply_s=_micros(apply_s),
        comm_s=comm_s,
        stalled=stalled,
        plan=plan,
        generation=(number > LEAVES) + (number > JOINS),
    )


def _loss(number: int) -> float:
    return 1.35 + 4.2 * math.exp(-number / 35) + 0.04 * math.sin(number * 2.3)


def _micros(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(each, 6) for each in seconds)


def _planned(t: float, step: int, name: str, shares: tuple[int, ...], reason: str) -> Planned:
    return Planned(t=t, step=step, id=name, shares=shares, micro_batch=shares, reason=reason, predicted_step_s=0.21)


def _finding(t: float, step: int, *, over: bool) -> Finding:
    return Finding(
        t=t,
        step=step,
        rank=1,
        name="desk/1",
        host="desk",
        cause="data",
        since_step=SLOW_FROM,
        lost_s=0.082,
        text="rank 1 (desk/1 on desk) holds the others up by 82 ms a step: its loader takes 89 ms (others 4 ms)",
        over=over,
    )


def _vitals(t: float, step: int, members: Sequence[Member]) -> Vitals:
    gpu = [member.device != "cpu" for member in members]
    return Vitals(
        t=t,
        step=step,
        memory_bytes=tuple(int(member.memory_bytes * 0.55) for member in members),
        peak_memory_bytes=tuple(int(member.memory_bytes * 0.71) for member in members),
        temperature_c=tuple(61.0 + 4 * rank if is_gpu else 0.0 for rank, is_gpu in enumerate(gpu)),
        clock_mhz=tuple(1695.0 - 60 * rank if is_gpu else 0.0 for rank, is_gpu in enumerate(gpu)),
        busy=tuple(0.93 - 0.02 * rank if is_gpu else 0.0 for rank, is_gpu in enumerate(gpu)),
    )


def _verdict(t: float, step: int, members: Sequence[Member]) -> Verdict:
    gains = {"desk/0": 0.742, "desk/1": 0.461, "nook/0": 0.178, "nook/1": -0.0431, "nook/2": 0.0871}
    return Verdict(
        t=t,
        step=step,
        devices=tuple(
            Worth(
                rank=rank,
                name=member.name,
                gain=gains[member.name],
                text=f"{'adds' if gains[member.name] > 0 else 'costs'} {abs(100 * gains[member.name]):.0f} %",
            )
            for rank, member in enumerate(members)
        ),
    )
