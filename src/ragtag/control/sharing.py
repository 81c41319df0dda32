"""The first plan of a run, and what a plan means in units for a batch of any size.

The one idea: a plan is a value with its reason in it, made by pure functions of numbers that every rank has.
"""

from collections.abc import Sequence

import msgspec

from ragtag.core.errors import SettingError
from ragtag.core.values import Plan
from ragtag.plan.apportion import apportion

_BATCH_NORM_UNIT = 8
_LARGEST_UNIT = 32


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan made beforehand says a run begins with; tuples are by rank."""

    shares: tuple[int, ...] | None = None
    """Samples of a full batch; shares follow speed from there. None: equal ones."""
    micro_batch: tuple[int | None, ...] | None = None
    """Most samples in one forward, for as long as the run lasts; None: any number."""


def choose_unit(*, global_batch_size: int, separable: bool, batch_norm: bool) -> tuple[int, str]:
    """Return how many samples are always computed together, and one line that says why.

    Nothing of the cluster goes in: the unit decides the gradient of a run that is not separable, and the gradient
    must not change with the machines.
    """
    if separable:
        return 1, "unit 1: every sample's loss is its own, so any split gives the same gradient"
    least = min(_BATCH_NORM_UNIT, global_batch_size) if batch_norm else 1
    unit = max(least, min(max(global_batch_size // 16, 1), _LARGEST_UNIT))
    if batch_norm:
        return unit, f"unit {unit}: BatchNorm sees {unit} samples at a time, on any split"
    return unit, f"unit {unit}: samples of one forward share random numbers or a loss, so they stay together"


def initial_plan(
    *,
    world_size: int,
    global_batch_size: int,
    unit: int,
    shares: Sequence[int] | None = None,
    micro_batch: int | None = None,
    caps: Sequence[int | None] | None = None,
    separable_reason: str = "",
    start: Start | None = None,
) -> Plan:
    """Return the plan a run starts with: `shares` (samples by rank) where they are pinned, else those of `start`, else
    equal ones.

    With `unit` > 1 whole units are dealt out in proportion, and the plan's shares are the samples of these units.
    `caps` are the most samples that each rank has memory for (None: any number); pinned shares overrule them.
    `separable_reason` says why `unit` is what it is; it is added to the plan's reason.

    Raises:
        SettingError: shares of the wrong length, negative, or not summing to the batch; sizes that contradict; a batch
        that does not fit under the caps.
    """
    _check_sizes(world_size, global_batch_size, unit, micro_batch)
    start = start or Start()
    if shares is not None:
        _check_shares("shares", shares, world_size, global_batch_size)
    elif start.shares is not None:
        _check_shares("the plan's shares", start.shares, world_size, global_batch_size)
    if start.micro_batch is not None and len(start.micro_batch) != world_size:
        raise SettingError(
            f"The plan has micro-batches for {len(start.micro_batch)} ranks, but there are {world_size}. Plan for "
            f"these devices: ragtag plan."
        )
    num_units = -(-global_batch_size // unit)
    given_shares = start.shares if shares is None else shares
    if given_shares is None:
        units = apportion(
            num_units, [1] * world_size, [None if cap is None else cap // unit for cap in caps or ()] or None
        )
    else:
        units = apportion(num_units, given_shares)
    given = samples_of_units(units, global_batch_size, unit)
    return Plan(
        shares=given,
        micro_batch=_micro_batches(given, unit, micro_batch, start.micro_batch),
        unit=unit,
        chunk_weights=(1,) * world_size,
        reason=_reason(given_shares, given, num_units, unit, separable_reason, pinned=shares is not None),
    )


def next_plan(
    plan: Plan,
    units: Sequence[int],
    *,
    micro_batch: int | None = None,
    memory: Sequence[int | None] | None = None,
    reason: str,
) -> Plan:
    """Return the plan after `plan` that deals the same batch out as `units` by rank.

    `memory` is how many samples of one forward each rank's memory holds (None: any number), whatever `micro_batch` is.
    """
    shares = samples_of_units(units, sum(plan.shares), plan.unit)
    return msgspec.structs.replace(
        plan,
        shares=shares,
        micro_batch=_micro_batches(shares, plan.unit, micro_batch, memory),
        reason=reason,
        epoch=plan.epoch + 1,
    )


def units_per_rank(plan: Plan, samples: int) -> tuple[int, ...]:
    """Return how many units each rank has of `samples` samples: a full batch, a ragged last one, or a whole dataset.

    A full batch is cut exactly at the plan's shares; any other number in proportion to them.
    """
    if samples != sum(plan.shares):
        return apportion(-(-samples // plan.unit), plan.shares)
    units, start = [], 0
    for share in plan.shares:
        units.append(-(-(start + share) // plan.unit) - -(-start // plan.unit))
        start += share
    return tuple(units)


def samples_of_units(units: Sequence[int], samples: int, unit: int) -> tuple[int, ...]:
    """Return the samples by rank when `samples` are cut into units in order; the last unit may be short."""
    shares, start = [], 0
    for count in units:
        stop = min(start + count * unit, samples)
        shares.append(stop - start)
        start = stop
    return tuple(shares)


def _micro_batches(
    shares: Sequence[int], unit: int, micro_batch: int | None, memory: Sequence[int | None] | None = None
) -> tuple[int, ...]:
    if unit > 1:
        return (unit,) * len(shares)
    # A rank without a share may still be given work that another one lost.
    sizes = [micro_batch or max(1, share) for share in shares]
    return tuple(min(size, most or size) for size, most in zip(sizes, memory or sizes))


def _reason(
    shares: Sequence[int] | None,
    given: tuple[int, ...],
    num_units: int,
    unit: int,
    unit_reason: str,
    *,
    pinned: bool,
) -> str:
    listed = ", ".join(map(str, given))
    if shares is not None:
        reason = f"{'pinned' if pinned else 'as planned, to begin with'}: {', '.join(map(str, shares))}"
        if tuple(shares) != given:
            reason += f" (in whole units of {unit}: {listed})"
    elif len(given) == 1:
        reason = "alone: one rank has the whole batch"
    else:
        reason = "equal: nothing measured yet"
        if num_units < len(given):
            reason += f" ({len(given) - num_units} of {len(given)} ranks idle: the batch has only {num_units} units)"
    return f"{reason}; {unit_reason}" if unit_reason else reason


def _check_sizes(world_size: int, global_batch_size: int, unit: int, micro_batch: int | None) -> None:
    assert world_size >= 1, f"world size {world_size}"
    if global_batch_size < 1:
        raise SettingError(f"global_batch_size = {global_batch_size} is not valid. Expected at least 1 sample.")
    if not 1 <= unit <= global_batch_size:
        raise SettingError(
            f"unit = {unit} is not valid with global_batch_size = {global_batch_size}. "
            f"Expected 1 to {global_batch_size} samples."
        )
    if micro_batch is not None and micro_batch < 1:
        raise SettingError(f"micro_batch = {micro_batch} is not valid. Expected at least 1 sample, or None.")
    if micro_batch is not None and unit > 1 and micro_batch < unit:
        raise SettingError(
            f"micro_batch = {micro_batch} is smaller than unit = {unit}, and a unit is computed in one forward. "
            f"Expected micro_batch of at least {unit}, or a smaller unit: Config(unit={micro_batch})."
        )


def _check_shares(name: str, shares: Sequence[int], world_size: int, global_batch_size: int) -> None:
    listed = ", ".join(map(str, shares))
    if not all(isinstance(share, int) and not isinstance(share, bool) and share >= 0 for share in shares):
        raise SettingError(f"{name} = ({listed}) is not valid. Expected whole numbers of samples, at least 0 each.")
    if len(shares) != world_size:
        raise SettingError(
            f"{name} = ({listed}) has {len(shares)} numbers, but there are {world_size} ranks. "
            f"Expected one number a rank, summing to global_batch_size = {global_batch_size}."
        )
    if sum(shares) != global_batch_size:
        raise SettingError(
            f"{name} = ({listed}) sums to {sum(shares)}, but global_batch_size = {global_batch_size}. "
            f"Expected shares that sum to {global_batch_size}; or set global_batch_size={sum(shares)}."
        )
