"""Slices when ranks come and go: whoever is there cuts the state anew; what went with a rank comes from a checkpoint.

The one idea: a cut is numbered, and a rank says which one its slices are of. Where those who are there have all of the
newest one, slices move and nothing is lost; where they have not, everybody loads the last checkpoint, and says so.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import torch

from ragtag.checkpoint.directory import Directory
from ragtag.checkpoint.storage import open_storage
from ragtag.control.layout import Room, slices_for
from ragtag.core.errors import CheckpointError
from ragtag.emulate.memory import MemoryCap
from ragtag.runtime import resuming, state
from ragtag.runtime.run import Run
from ragtag.runtime.zero.choosing import capacity_bytes
from ragtag.runtime.zero.sharding import Sharding

log = logging.getLogger("ragtag")


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of its slices."""

    cut: int
    """Number of the cut they are of; -1: it has none."""
    rank: int
    """Its rank in that cut."""
    weights: tuple[int, ...]
    room: Room


def hand_over(run: Run, leavers: Collection[int]) -> None:
    """Before ranks leave that have said so: the others take over their slices. A call of the group."""
    sharding, group = run.sharding, run.group
    if sharding is None or len(set(leavers)) == group.world_size:
        return
    group.note(run.committed, "taking over slices")
    rooms = [each.room for each in _held(run, sharding)]
    rooms = [Room(capacity_bytes=0) if rank in leavers else room for rank, room in enumerate(rooms)]
    weights = slices_for(sharding.needs, sharding.layout, rooms, gone=leavers)
    sharding.cut_anew(group, tuple(range(group.world_size)), weights)


def settle(run: Run) -> tuple[int, ...]:
    """In a new generation: have every rank hold slices of one cut, and return their relative sizes. A call of the
    group.

    Raises:
        CheckpointError: on every rank: slices are lost, and there is no checkpoint.
    """
    sharding, group = run.sharding, run.group
    assert sharding is not None, "whoever cuts nothing has no slices"
    held = _held(run, sharding)
    newest = max(each.cut for each in held)
    owners = tuple([each.rank if each.cut == newest else -1 for each in held])
    present = next(each for each in held if each.cut == newest)
    lost = [rank for rank, weight in enumerate(present.weights) if weight and rank not in owners]
    weights = slices_for(sharding.needs, sharding.layout, [each.room for each in held])
    if not lost and newest >= 0:
        sharding.weights, sharding.num_cuts = present.weights, newest
        sharding.cut_anew(group, owners, weights)
    else:
        sharding.num_cuts = max(newest, 0)
        sharding.cut_empty(group, weights)
        _load_last(run, len(lost))
    run.is_new = False
    return weights


def rest_of(run: Run, script: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a newcomer needs besides slices, which it has by then."""
    sharding = run.sharding
    assert sharding is not None, "whoever cuts nothing sends all of it"
    with sharding.reading():
        own = run.model.state_dict(keep_vars=True)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in run.optimizer.param_groups]
    return {
        "committed": run.committed,
        "script": dict(script),
        "model": {name: value for name, value in own.items() if id(value) not in sharding.number_of},
        "buffers": dict(zip(run.buffers.names, run.buffers.values())),
        "groups": groups,
        "scheduler": None if run.scheduler is None else state.plain_scheduler(run.scheduler.state_dict()),
        "loss_scale": run.loss_scale.state_dict(),
        "state": {name: item.state_dict() for name, item in run.state.items()},
        "save_first": run.save_first,
        "history": None if run.history is None else msgspec.to_builtins(run.history),
    }


def take_rest(run: Run, tree: Mapping[str, Any]) -> None:
    """A newcomer's part: take what `rest_of` gave on rank 0."""
    sharding = run.sharding
    assert sharding is not None, "whoever cuts nothing takes all of it"
    if tree["model"]:
        run.model.load_state_dict(tree["model"], strict=False)
    with torch.no_grad():
        for name, buffer in zip(run.buffers.names, run.buffers.values()):
            buffer.copy_(tree["buffers"][name])
    for group, settings in zip(run.optimizer.param_groups, tree["groups"], strict=True):
        group.update(state.placed_like(group, settings))
    if run.scheduler is not None:
        run.scheduler.load_state_dict(tree["scheduler"])
    run.loss_scale.load_state_dict(tree["loss_scale"])
    for name, item in run.state.items():
        item.load_state_dict(state.placed_like(item.state_dict(), tree["state"][name]))
    run.save_first = tree["save_first"]
    run.jump_to(tree["committed"])


def _held(run: Run, sharding: Sharding) -> list[Held]:
    mine = Held(
        cut=sharding.num_cuts if sharding.intact and not run.is_new else -1,
        rank=sharding.rank,
        weights=sharding.weights,
        room=Room(
            capacity_bytes=capacity_bytes(run.group, run.memory, run.device),
            counts_copies=not isinstance(run.memory, MemoryCap),
        ),
    )
    said = run.group.gather("slices", msgspec.to_builtins(mine))
    return [msgspec.convert(each, Held) for each in said]


def _load_last(run: Run, num_lost: int) -> None:
    """Load the last checkpoint: the run goes back to its step."""
    where, before = run.config.checkpoint, run.committed
    what = f"{num_lost} rank(s) went, and with them slices of the model's state (layout '{run.plan.layout}')"
    directory = None if where is None else Directory(open_storage(where))
    found = None if directory is None else resuming.read_newest(run, directory)
    if directory is None or found is None:
        way_out = "Keep some: Config(checkpoint=DIRECTORY) or --checkpoint."
        error = CheckpointError(f"{what}; there is no checkpoint to go back to, so the run ends. {way_out}")
        error.origin_rank = 0
        raise error
    state.restore(run, found.tree, directory.where(found.mark), found.parts)
    run.late_report, run.in_hand = None, None
    if run.group.rank == 0:
        log.warning(
            "%s: the run goes back from step %d to step %d, of which there is the checkpoint %s.",
            what,
            before,
            run.committed,
            directory.where(found.mark),
        )
