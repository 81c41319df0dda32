"""What kind of model this is, found out by rank 0 before step 1 and told to all.

The one idea: one rank tries, on as many samples as its memory holds, and the others learn what it found; so all ranks
go on alike, whatever their devices are.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import torch

from ragtag.comm.group import Group
from ragtag.core.config import Config
from ragtag.core.errors import RagtagError
from ragtag.emulate.memory import MemoryLimit
from ragtag.runtime.out_of_memory import memory_explained, ran_out_of_memory, release_memory
from ragtag.runtime.trial import Nature, compute_round, try_loss
from ragtag.runtime.zero.rounds import Rounds
from ragtag.runtime.zero.schedule import Noted
from ragtag.runtime.zero.trying import begin_trial, following, leading

log = logging.getLogger("ragtag")

_ROOM_ON_RANK_0 = (
    "Make samples shorter or the model smaller, use precision='bf16' or torch.utils.checkpoint, or give rank 0 (the "
    "first worker of the machine that is started first) the device with the most memory."
)


def find_nature(
    model: torch.nn.Module,
    loss_fn: Any,
    samples: Callable[[], list[Any]],
    collate: Callable[[list[Any]], Any],
    *,
    device: torch.device,
    precision: str,
    objects: Mapping[str, Any],
    config: Config,
    group: Group,
    memory: MemoryLimit,
    rounds: Rounds | None,
) -> tuple[Nature, list[Noted]]:
    """Rank 0 tries the loss; everybody learns what it found. Where there are rounds, rank 0 notes one.

    Args:
        samples: gives a few of step 1; asked on rank 0 only.
        objects: what is registered in `state`.
        rounds: where every micro-batch is one of all ranks.
    """
    nature: Nature | None = None
    noted: list[Noted] = []
    if group.rank == 0:
        group.note(0, "trying the loss on a few samples")
        chosen = samples()

        def attempt(samples: Sequence[Any]) -> Nature:
            begin_trial(rounds)
            with memory.forward_backward():
                return try_loss(
                    model,
                    loss_fn,
                    samples,
                    collate,
                    device,
                    by_unit=config.unit is not None,
                    check_loss=config.check_loss,
                    precision=precision,
                    state_modules=tuple(objects.values()),
                )

        def one_round(samples: Sequence[Any]) -> list[Noted]:
            begin_trial(rounds)
            with memory.forward_backward():
                compute_round(model, loss_fn, samples, collate, device, precision)
            return [] if rounds is None else list(rounds.noted or ())

        with leading(rounds, group) if rounds is not None else nullcontext():
            nature = _with_what_fits(attempt, chosen, device, group)
            if rounds is not None:
                noted = _with_what_fits(one_round, chosen, device, group)
    elif rounds is not None:
        following(rounds, group)
    found = group.gather("nature", None if nature is None else msgspec.to_builtins(nature))[0]
    return msgspec.convert(found, Nature), noted


def _with_what_fits(
    attempt: Callable[[Sequence[Any]], Any], samples: Sequence[Any], device: torch.device, group: Group
) -> Any:
    """What the trial finds with as many of the samples, the smallest first, as this rank's memory holds."""
    refused: Exception | None = None
    for count in sorted({len(samples), 2, 1}, reverse=True):
        try:
            return attempt(samples[:count])
        except Exception as error:
            if not isinstance(error, RagtagError) and ran_out_of_memory(error):
                refused = error.with_traceback(None)  # with its frames goes what they hold in memory
                refused.__context__ = None
            elif refused is None or count > 1 or isinstance(error, RagtagError):
                raise
            # else one sample fits, but is no batch for this model
        release_memory(device)
        log.warning(
            "rank %d (%s), %s, ran out of memory while trying the loss on %d sample(s) before step 1",
            group.rank,
            group.hosts[group.rank],
            device,
            count,
        )
    assert refused is not None
    with memory_explained(group, device, "trying the loss on one sample, before step 1,", _ROOM_ON_RANK_0):
        raise refused
    raise AssertionError
