"""The vote: what each rank tells every other once it holds the complete reduced gradient, and the one pure rule that
reads it.

A ballot is a fixed-length record sent over a point-to-point mesh. Having everybody's ballot means that everybody holds
the gradient; every rank then computes the same outcome from the same bytes, so no second message is needed.
"""

import math
import struct
from collections.abc import Iterable, Sequence

import msgspec

from ragtag.core.errors import DisagreementError

_FIXED = struct.Struct("<qQqIIIqq13d4q3d")
_HELD_ALL = -1
"""Stands for `fits` = None."""


class Ballot(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's vote on one step."""

    step: int
    plan_hash: int
    """The plan's content hash as an unsigned 64-bit number; unequal plans never commit."""
    attempt: int = 0
    """How often this step has been reduced before."""
    launched_too_early: bool = False
    """A gradient arrived after its bucket had left: everybody must reduce again."""
    absent: bool = False
    """Cast in the name of a rank that has not come back from its data or its forward: others are to do its work."""
    regroup: bool = False
    """This rank was told that newcomers wait: all leave the generation after this step."""
    spoilt: bool = False
    """Part of what was reduced was launched before its rank ran out of memory and began anew: everybody must reduce
    again."""
    fits: int | None = None
    """Its memory ran out in this step: most samples in one forward that it tries from now on, 0 if there is nothing
    smaller to try and others are to do its work. None: its memory held everything."""
    outer: bool = False
    """This rank asks that all stop for other islands after this step; rank 0's counts."""
    save: bool = False
    """This rank's clock says that a checkpoint is due after this step; rank 0's counts."""
    stop: int = 0
    """Number of the signal that asks this rank to end after this step; 0: none does."""
    contents_hash: int
    """Sum of hashed unit ids in this rank's sum, mod 2**32."""
    samples: int
    weight: float
    loss_total: float
    norm: float
    """2-norm of the reduced, undivided gradient as this rank computed it."""
    compute_s: float
    exposed_s: float
    """From the end of own work to the complete reduced gradient: communication plus waiting for slower ranks."""
    data_s: float
    apply_s: float
    """Time of the previous step's optimizer and scheduler."""
    add_s: float = 0.0
    """Seconds that adding a whole gradient to another takes this rank's processor."""
    send_s: float = 0.0
    """Seconds that sending as much as a gradient takes it; 0: not measured."""
    redo_s: float = 0.0
    """Seconds of this step's work that was lost because memory ran out."""
    host_s: float = 0.0
    """Seconds in which a thread that does this rank's own work could have run and did not, since its processor did
    something else; 0: none, or nobody counts them here."""
    link_host_s: float = 0.0
    """The same of what receives other ranks' sums, since the end of own work."""
    link_s: float = 0.0
    """Seconds for which it waited for messages that the preceding rank had handed over, in the step before: the other
    end's stamps come with its vote."""
    faults: int = 0
    """Pages that had to be read from disk since the last step."""
    sent_bytes: int = 0
    """Of gradients, parameters and activations that it has handed to its links since the vote before."""
    memory_bytes: int = 0
    """What `Vitals` says of its device, up to some seconds ago; 0: not known."""
    peak_memory_bytes: int = 0
    temperature_c: float = 0.0
    clock_mhz: float = 0.0
    busy: float = 0.0
    metrics: tuple[float, ...] = ()
    has_gradient: bytes = b""


def pack(ballot: Ballot) -> bytes:
    """Encode a ballot; the length depends only on the numbers of metrics and parameters, equal on all ranks."""
    b = ballot
    fixed = _FIXED.pack(
        b.step, b.plan_hash, b.attempt, int(b.launched_too_early),
        int(b.absent) | 2 * int(b.regroup) | 4 * int(b.save) | 8 * int(b.spoilt) | 16 * int(b.outer) | b.stop << 8,
        b.contents_hash, b.samples, _HELD_ALL if b.fits is None else b.fits,
        b.weight, b.loss_total, b.norm, b.compute_s, b.exposed_s, b.data_s, b.apply_s, b.add_s, b.send_s,
        b.redo_s, b.host_s, b.link_host_s, b.link_s, b.faults, b.sent_bytes, b.memory_bytes, b.peak_memory_bytes,
        b.temperature_c, b.clock_mhz, b.busy,
    )  # fmt: skip
    return fixed + struct.pack(f"<{len(b.metrics)}d", *b.metrics) + b.has_gradient


def unpack(data: bytes, *, num_metrics: int) -> Ballot:
    """Decode what `pack` encoded."""
    step, plan_hash, attempt, early, absent, contents, samples, fits, *numbers = _FIXED.unpack_from(data)
    weight, loss_total, norm, compute_s, exposed_s, data_s, apply_s, add_s, send_s = numbers[:9]
    redo_s, host_s, link_host_s, link_s, faults, sent_bytes, memory_bytes, *state = numbers[9:]
    peak_memory_bytes, temperature_c, clock_mhz, busy = state
    return Ballot(
        step=step,
        plan_hash=plan_hash,
        attempt=attempt,
        launched_too_early=bool(early),
        absent=bool(absent & 1),
        regroup=bool(absent & 2),
        save=bool(absent & 4),
        stop=absent >> 8,
        spoilt=bool(absent & 8),
        outer=bool(absent & 16),
        fits=None if fits == _HELD_ALL else fits,
        contents_hash=contents,
        samples=samples,
        weight=weight,
        loss_total=loss_total,
        norm=norm,
        compute_s=compute_s,
        exposed_s=exposed_s,
        data_s=data_s,
        apply_s=apply_s,
        add_s=add_s,
        send_s=send_s,
        redo_s=redo_s,
        host_s=host_s,
        link_host_s=link_host_s,
        link_s=link_s,
        faults=faults,
        sent_bytes=sent_bytes,
        memory_bytes=memory_bytes,
        peak_memory_bytes=peak_memory_bytes,
        temperature_c=temperature_c,
        clock_mhz=clock_mhz,
        busy=busy,
        metrics=struct.unpack_from(f"<{num_metrics}d", data, _FIXED.size),
        has_gradient=data[_FIXED.size + 8 * num_metrics :],
    )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do with the step, the same everywhere."""

    reduce_again: bool = False
    spoilt: bool = False
    """What was reduced is worthless, although by now every own sum is whole: all reduce again."""
    incomplete: bool = False
    """What ranks absent or out of memory have not computed is in no sum: others compute it, and all reduce again."""
    absent: frozenset[int] = frozenset()
    """Ranks that were stood in for."""
    unable: frozenset[int] = frozenset()
    """Ranks whose memory does not hold even the smallest piece of work."""
    save: bool = False
    """A checkpoint is due after this step."""
    outer: bool = False
    """All stop for other islands after this step."""
    stop: int = 0
    """All end after this step, because of the signal of this number; 0: go on."""
    finite: bool = True
    weight: float
    loss_total: float
    metrics: tuple[float, ...]
    norm: float
    """Rank 0's norm, used by all: thread counts change its last bits, and clipping must not."""
    has_gradient: bytes
    compute_s: tuple[float, ...]
    comm_s: float
    wait_s: tuple[float, ...]


def tally(ballots: Sequence[Ballot], *, expected_hash: int, sliced: bool = False, in_rounds: bool = False) -> Outcome:
    """Read everybody's ballots, in rank order.

    Where the reduced gradient is `sliced`, each rank votes with the norm of its own slice. Where all compute in rounds,
    what one rank has not added spoils everybody's sum.

    Communication is what even the last rank to finish its own work still had to wait; anything beyond that is waiting
    for slower ranks.

    Raises:
        DisagreementError: the ranks are not voting on the same step and plan, a unit is missing although no rank is
            absent or out of memory, or counted twice, a weight is negative, or norms differ by more than rounding.
    """
    first = ballots[0]
    for rank, ballot in enumerate(ballots):
        for name in ("step", "plan_hash", "attempt"):
            if getattr(ballot, name) != getattr(first, name):
                raise _for_all(
                    f"rank {rank} votes with {name} {getattr(ballot, name)} where rank 0 has {getattr(first, name)}: "
                    f"the ranks are not in the same place. Does every rank call steps, evaluate and load alike?"
                )
        if ballot.weight < 0:
            raise _for_all(f"rank {rank} has a negative total weight {ballot.weight} in step {first.step}.")
    held = sum(ballot.contents_hash for ballot in ballots) % 2**32
    absent = frozenset(rank for rank, ballot in enumerate(ballots) if ballot.absent)
    unable = frozenset(rank for rank, ballot in enumerate(ballots) if ballot.fits == 0)
    spoilt = any(ballot.spoilt for ballot in ballots)
    if held != expected_hash and not absent and not unable and not (in_rounds and spoilt):
        raise _for_all(
            f"the gradient sums of step {first.step} do not hold every sample exactly once "
            f"(contents {held:#010x}, expected {expected_hash:#010x}); the step was not applied."
        )
    weight = _sum(ballot.weight for ballot in ballots)
    loss_total = _sum(ballot.loss_total for ballot in ballots)
    norm = math.sqrt(_sum(ballot.norm**2 for ballot in ballots)) if sliced else first.norm
    finite = math.isfinite(norm) and math.isfinite(loss_total) and math.isfinite(weight)
    if finite and not sliced:
        for rank, ballot in enumerate(ballots):
            if not abs(ballot.norm - first.norm) <= 1e-3 * max(abs(first.norm), 1e-30):
                raise _for_all(
                    f"rank {rank} holds a reduced gradient of norm {ballot.norm:.9g} in step "
                    f"{first.step}, rank 0 one of "
                    f"{first.norm:.9g}: bytes were corrupted on the way or in memory."
                )
    comm_s = min(ballot.exposed_s for ballot in ballots)
    bits = 0
    for ballot in ballots:
        bits |= int.from_bytes(ballot.has_gradient, "little")
    return Outcome(
        reduce_again=any(ballot.launched_too_early for ballot in ballots),
        spoilt=spoilt,
        incomplete=held != expected_hash,
        absent=absent,
        unable=unable,
        save=first.save,
        outer=first.outer and not absent,
        stop=max(ballot.stop for ballot in ballots),
        finite=finite,
        weight=weight,
        loss_total=loss_total,
        metrics=tuple(_sum(values) for values in zip(*(ballot.metrics for ballot in ballots))),
        norm=norm,
        has_gradient=bits.to_bytes(len(first.has_gradient), "little"),
        compute_s=tuple(ballot.compute_s for ballot in ballots),
        comm_s=comm_s,
        wait_s=tuple(ballot.exposed_s - comm_s + ballot.data_s for ballot in ballots),
    )


def _sum(values: Iterable[float]) -> float:
    """Sum that lets NaN and infinities through, where `math.fsum` raises on opposite infinities."""
    total = 0.0
    for value in values:
        total += value
    return total


def _for_all(message: str) -> DisagreementError:
    """An error that every rank raises from the same ballots; rank 0 prints it."""
    error = DisagreementError(message)
    error.origin_rank = 0
    return error
