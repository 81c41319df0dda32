"""One device from first micro-batch to `DeviceProfile`: limit, memory line, times, parts, with and without recompute.

The one idea: memory first. Only sizes that were seen to fit are timed, so nothing that is measured can end the run.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median

import msgspec

from ragtag.core.errors import RagtagError
from ragtag.core.profile import DeviceProfile, Memory, Timing
from ragtag.core.quantities import format_bytes
from ragtag.profile.limit import Limit, find_limit, sizes_to_time
from ragtag.profile.memory_line import memory_line, per_sample_from
from ragtag.profile.probe import MicroBatch, Probe
from ragtag.profile.repeat import repeat_in_turn
from ragtag.profile.statistics import half_spread, relative_deviation


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How long measuring one device may take, in seconds."""

    timing_s: float = 14.0
    recompute_s: float = 6.0
    update_s: float = 3.0
    longest_try_s: float = 3.0
    """A size is not tried for memory where it would take longer than this."""
    repetitions: int = 40
    """Of each size, at most."""


def measure_device(
    probe: Probe,
    *,
    name: str,
    uuid: str,
    kind: str,
    least: int,
    most: int,
    also: Sequence[int] = (),
    reads_ahead: bool = False,
    effort: Effort | None = None,
    progress: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
    measured_at: float = 0.0,
) -> DeviceProfile:
    """Measure everything about one device that needs no other rank.

    Args:
        probe: the device with the model.
        name, uuid, kind: go into the profile.
        least: smallest micro-batch of interest, in samples.
        most: largest one, at most the global batch.
        also: sizes that are timed too, where they fit.
        reads_ahead: loader workers read samples while the device computes, so their time is not the step's.
        effort: how long it may take.
        progress: told what is being measured.
        clock: wall clock, in seconds.
        measured_at: seconds since 1970.

    Raises:
        RagtagError: not even a micro-batch of `least` samples fits; names the device, what it needs and what it has.
    """
    effort = effort or Effort()
    progress("memory")
    limit, memory = _measure_memory(probe, name, least, most, effort, clock)
    progress(f"micro-batches of {least} to {limit.largest}")
    sizes = sorted({*sizes_to_time(least, limit.largest), *(size for size in also if size <= limit.largest)})
    timed = _time(probe, sizes, False, effort.timing_s, effort, clock)
    progress("optimizer")
    updates = repeat_in_turn(
        lambda _: probe.update(),
        [1],
        seconds_of=lambda update: update.optimizer_s,
        budget_s=effort.update_s,
        clock=clock,
        most=effort.repetitions,
    )[1]
    largest_timed = timed[max(timed)]
    parts = [each.forward_s / each.total_s for each in largest_timed]
    data_s = [each.data_s / size for size, several in timed.items() for each in several]
    recompute_timings: tuple[Timing, ...] = ()
    notes: list[str] = []
    if limit.refused is None and limit.largest < most:
        notes.append(f"Micro-batches above {limit.largest} samples were not tried: one takes too long.")
    if probe.refusal:
        notes.append(f"Recomputation of activations and blocks were not measured: {probe.refusal}.")
    else:
        progress("recomputing activations")
        memory, recompute_timings = _with_recompute(probe, memory, limit, most, effort, clock)
    optimizers, fixeds = [each.optimizer_s for each in updates], [each.fixed_s for each in updates]
    return DeviceProfile(
        name=name,
        uuid=uuid,
        kind=kind,
        timings=_timings(timed),
        recompute_timings=recompute_timings,
        forward_part=median(parts),
        optimizer_s=median(optimizers),
        fixed_s=median(fixeds),
        capacity_bytes=probe.capacity_bytes,
        memory=memory,
        bucket_ready=_bucket_ready(largest_timed),
        jitter=relative_deviation([each.total_s for each in several] for several in timed.values()),
        data_s=0.0 if reads_ahead else median(data_s),
        spreads={
            "forward_part": half_spread(parts),
            "optimizer_s": half_spread(optimizers),
            "fixed_s": half_spread(fixeds),
            "data_s": half_spread(data_s),
        },
        notes=tuple(notes),
        measured_at=measured_at,
    )


def _measure_memory(
    probe: Probe, name: str, least: int, most: int, effort: Effort, clock: Callable[[], float]
) -> tuple[Limit, Memory]:
    if probe.fits(least, recompute=False):
        probe.update()  # the optimizer's state is there from now on
    limit = _find_limit(probe, least, most, False, effort, clock)
    if limit.largest == 0:
        recompute = not probe.refusal and probe.fits(least, recompute=True)
        has = "" if probe.capacity_bytes is None else f"; it has {format_bytes(probe.capacity_bytes)}"
        way_out = " With activation recompute it would fit." if recompute else ""
        raise RagtagError(
            f"Device '{name}' cannot train this model: a micro-batch of {least} sample(s) does not fit beside "
            f"parameters, gradients and optimizer state, which take {format_bytes(probe.kept_bytes())}{has}.{way_out} "
            f"Leave the device out, make the model smaller, or correct its memory in the cluster file: memory = ..."
        )
    peaks = _peaks(probe, least, limit, False)
    memory = memory_line(peaks, limit=limit, capacity_bytes=probe.capacity_bytes, floor_bytes=probe.kept_bytes())
    return limit, memory


def _with_recompute(
    probe: Probe, memory: Memory, plain: Limit, most: int, effort: Effort, clock: Callable[[], float]
) -> tuple[Memory, tuple[Timing, ...]]:
    limit = _find_limit(probe, plain.largest, most, True, effort, clock)
    if limit.largest == 0:  # it needs more than without, which happens with blocks of single layers
        return memory, ()
    peak_bytes = probe.peak_bytes(limit.largest, recompute=True)
    per_sample = per_sample_from(memory.fixed_bytes, peak_bytes, limit=limit, capacity_bytes=probe.capacity_bytes)
    sizes = sorted({max(1, limit.largest // 4), max(1, limit.largest // 2), limit.largest})
    timed = _time(probe, sizes, True, effort.recompute_s, effort, clock)
    return msgspec.structs.replace(memory, recompute_per_sample_bytes=per_sample), _timings(timed)


def _find_limit(
    probe: Probe, least: int, most: int, recompute: bool, effort: Effort, clock: Callable[[], float]
) -> Limit:
    last = {"size": least, "seconds": 0.0}

    def fits(size: int) -> bool:
        began_s = clock()
        fitted = probe.fits(size, recompute=recompute)
        last.update(size=size, seconds=clock() - began_s)
        return fitted

    def worth_trying(size: int) -> bool:
        return last["seconds"] * size / last["size"] <= effort.longest_try_s

    return find_limit(fits, least=least, most=most, worth_trying=worth_trying)


def _peaks(probe: Probe, least: int, limit: Limit, recompute: bool) -> dict[int, int]:
    sizes = {least, max(least, limit.largest // 2), limit.largest}
    return {size: probe.peak_bytes(size, recompute=recompute) for size in sorted(sizes)}


def _time(
    probe: Probe, sizes: Sequence[int], recompute: bool, budget_s: float, effort: Effort, clock: Callable[[], float]
) -> dict[int, list[MicroBatch]]:
    return repeat_in_turn(
        lambda size: probe.micro_batch(size, recompute=recompute),
        sizes,
        seconds_of=lambda micro_batch: micro_batch.total_s,
        budget_s=budget_s,
        clock=clock,
        most=effort.repetitions,
    )


def _bucket_ready(several: Sequence[MicroBatch]) -> tuple[float, ...]:
    """By bucket, the part of the backward after which it may leave: when it is complete, and those before it too."""
    parts = [[seconds / (each.total_s - each.forward_s) for seconds in each.ready_s] for each in several]
    return tuple(accumulate((min(max(median(of_one), 0.0), 1.0) for of_one in zip(*parts)), max))


def _timings(timed: dict[int, list[MicroBatch]]) -> tuple[Timing, ...]:
    found = []
    for size, several in timed.items():
        seconds = [each.total_s for each in several]
        found.append(Timing(samples=size, seconds=median(seconds), spread_s=half_spread(seconds)))
    return tuple(found)
