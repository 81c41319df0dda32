"""A micro-batch that does not fit into this rank's memory: what it held is freed, and smaller ones take its place.

The one idea: until it begins to add, what the rank has summed is whole, and only this micro-batch is done again; after
that the rank throws its sum of the step away and does its whole share again. The ledger says what a sum holds, so the
gradient stays what it would have been. Where nothing smaller is left to try, the vote gives the rest to other ranks.
"""

import gc
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import torch

from ragtag.control.explain import samples
from ragtag.control.memory import smaller
from ragtag.core.errors import DeviceMemoryError, RagtagError
from ragtag.core.ledger import micro_batches
from ragtag.runtime.loss_sums import LossSums
from ragtag.runtime.work import StepWork, Units

if TYPE_CHECKING:
    from ragtag.comm.group import Group
    from ragtag.runtime.settling import Settling
    from ragtag.runtime.stand_in import Cover

log = logging.getLogger("ragtag")

_SIGNS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
)
"""What the texts of RuntimeErrors that no class tells apart say."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a device, or the host, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class OwnWork:
    """The micro-batches that this rank computes, in pieces that its memory holds.

    Iterate over it, and compute each piece inside `surviving()`; a piece that ran out of memory there comes again,
    smaller, with all that was lost with it. It ends early where not even the smallest piece fits.
    """

    def __init__(self, settling: "Settling", work: Iterable[Units], cover: "Cover") -> None:
        self._settling, self._work, self._cover = settling, work, cover
        self._pieces: deque[Units] = deque()
        self._failure = ""
        self._again = False
        """Pieces are as large as planned once more, since activations are not kept any longer."""

    def __iter__(self) -> Iterator[Units]:
        for units in self._work:
            self._pieces.extend(self._cut(units))
            while self._pieces:
                in_hand = self._pieces.popleft()
                yield in_hand
                if self._failure and not self._make_room(in_hand):
                    return

    def is_last(self) -> bool:
        """Whether the piece in hand is this rank's last one of the step; ask after its forward."""
        return not self._pieces and isinstance(self._work, StepWork) and self._work.is_last()

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Compute the piece in hand; its running out of memory ends here."""
        try:
            yield
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            # Only its words are kept: with the error go its frames, and with them what they hold in memory.
            self._failure = (str(error).strip() or type(error).__name__).splitlines()[0][:300]

    def _make_room(self, in_hand: Units) -> bool:
        """After the error is gone: free memory, undo what is not whole, and cut what is left; False: nothing fits."""
        settling, run, ledger = self._settling, self._settling.run, self._settling.ledger
        failure, self._failure = self._failure, ""
        self._cover.set_aside()
        run.group.note(settling.number, "making room after running out of memory")
        left = [*in_hand, *chain.from_iterable(self._pieces)]
        self._pieces.clear()
        everybodys = run.in_rounds
        if everybodys:
            drop_own_sum(settling, run.group.rank)
        elif settling.adding:
            left += ledger.contents(run.group.rank)
            drop_own_sum(settling, run.group.rank)
        release_memory(run.device)
        tried = ledger.span(in_hand[-1])[1] - ledger.span(in_hand[0])[0]
        settling.fits = smaller(tried, unit=ledger.unit, by_unit=run.by_unit)
        settling.failure = f"{samples(tried)} in one forward: {failure}"
        size = settling.fits
        if not size and run.recomputation.begin():
            settling.fits, size, self._again = None, tried, True
            then = "from now on it computes activations again in backward, instead of keeping them"
        else:
            then = f"trying {size}" if size else "others are to do the rest"
        then = f"all ranks do the step again, {then}" if everybodys else then
        log.warning(
            "step %d: rank %d (%s) ran out of memory with %s; %s",
            settling.number,
            run.group.rank,
            run.group.hosts[run.group.rank],
            settling.failure,
            then,
        )
        if everybodys:
            return False  # all ranks do all of the step again
        if size:
            self._pieces.extend(self._cut(sorted(left)))
        return bool(size)

    def _cut(self, units: Sequence[int]) -> list[Units]:
        settling = self._settling
        if settling.run.by_unit:
            return [(unit,) for unit in units]
        if settling.fits is None and not self._again:
            return [tuple(units)]
        most = settling.fits or settling.run.plan.micro_batch[settling.run.group.rank]
        return micro_batches(settling.ledger, units, most)


def drop_own_sum(settling: "Settling", rank: int) -> None:
    """Throw away what this rank, `rank`, has summed in the step and is not whole; its units are its own to do again."""
    run = settling.run
    settling.spoilt = run.gradients().drop()
    run.buffers.drop()
    settling.losses = LossSums(run.nature.metric_names, run.device)
    settling.ledger.drop(rank)
    settling.adding = False


@contextmanager
def memory_explained(group: "Group", device: torch.device | None, what: str, way_out: str) -> Iterator[None]:
    """Where what happens in here runs out of memory, say who did, on which device, what did not fit, and a way out.

    Raises:
        DeviceMemoryError: it did.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RagtagError) or not ran_out_of_memory(error):
            raise
        place = f", {device}," if device is not None else ""
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise DeviceMemoryError(
            f"rank {group.rank} ({group.hosts[group.rank]}){place} ran out of memory: {what} did not fit. {way_out} "
            f"What it said: {said}"
        ) from error


def no_rank_can(settling: "Settling") -> DeviceMemoryError:
    """The error that every rank raises when none can compute what is left; a call of the group."""
    run, unit = settling.run, settling.ledger.unit
    said = run.group.gather(f"out of memory in step {settling.number}", f"{run.device}, {settling.failure}")
    ranks = "".join(f"\n  rank {rank} ({run.group.hosts[rank]}), {text}" for rank, text in enumerate(said))
    if unit > 1:
        way_out = (
            f"A unit of {unit} samples is computed in one forward, so micro_batch cannot make it smaller. Set "
            f"Config(unit={unit // 2}), which needs about half as much"
        )
    else:
        way_out = (
            "One sample is computed in one forward, so Config(micro_batch=..., unit=...) cannot make it smaller. "
            "Make samples shorter, or use precision='bf16' or torch.utils.checkpoint"
        )
    error = DeviceMemoryError(
        f"step {settling.number}: {samples(unit)} in one forward fit into no rank's memory:{ranks}\n{way_out}; or use "
        f"a device with more memory."
    )
    error.origin_rank = 0
    return error


def release_memory(device: torch.device) -> None:
    """Give back what nobody refers to any more: cycles, and what the accelerator's allocator keeps for later."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
