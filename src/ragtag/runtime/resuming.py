"""Finding a state to go on from, with all ranks: whichever rank can see the newest one reads it and sends it round.

The one idea: a checkpoint may lie on one machine only, and after a restart that may be any rank's; so ranks first tell
each other what they see, and then all of them know, without another word, who is to read what.
"""

import logging
import os
from functools import partial
from typing import Any

import msgspec

from ragtag.checkpoint.directory import Directory, Mark, View, candidates, run_to_continue
from ragtag.checkpoint.file import load_outline
from ragtag.checkpoint.storage import is_remote, split
from ragtag.comm.group import Group
from ragtag.core.errors import CheckpointError
from ragtag.runtime import state
from ragtag.runtime.run import Run

log = logging.getLogger("ragtag")


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory had to offer."""

    mark: Mark
    tree: Any
    newest_generation: int
    """Of any checkpoint of that run, whether it could be read or not."""
    bad: tuple[Mark, ...] = ()
    """Newer ones, which could not be read."""


def read_file(run: Run, path: str | os.PathLike[str]) -> Any:
    """Return the checked tree in `path`, on every rank, from the lowest rank whose file of that name is the newest.

    Raises:
        CheckpointError: on every rank alike: no rank has it, or what was found is damaged or of another run.
    """
    group = run.group
    seen = group.gather("load", _seen(group, path))
    newest = max((each["step"] for each in seen), default=-1)
    if newest < 0:
        existing = [rank for rank, each in enumerate(seen) if each["exists"]]
        rank = min(existing, default=0)
    else:
        rank = min(rank for rank, each in enumerate(seen) if each["step"] == newest)

    def read() -> Any:
        storage, name = split(path)
        tree = storage.load(name)
        state.check(run, tree, str(path))
        return tree

    tree = state.on_rank(rank, group, "read", read)
    return state.broadcast_tree(tree, group, "loaded values", source=rank)


def _seen(group: Group, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Whether this rank has the file, and its step; -1: unknown."""
    if is_remote(path):  # for all ranks the same, and far away
        return {"exists": group.rank == 0, "step": -1}
    storage, name = split(path)
    file = os.path.join(storage.address, name)
    try:
        step = load_outline(file)["committed"]
        return {"exists": True, "step": step}
    except (CheckpointError, KeyError, TypeError):
        return {"exists": os.path.isfile(file), "step": -1}


def read_newest(run: Run, directory: Directory) -> Found | None:
    """Return the newest checkpoint of the run that `directory` is at, checked and on every rank; None: there is none.

    Raises:
        CheckpointError: on every rank alike: the directory cannot be used, all checkpoints in it are damaged, or they
            are of another model or run.
    """
    group = run.group
    views = [msgspec.convert(view, View) for view in group.gather("checkpoints", directory.view())]
    for rank, view in enumerate(views):
        if view.refusal is not None:
            raise _for_all(view.refusal, rank)
    name = run_to_continue(views)
    if name is None:
        return None
    chosen = candidates(views, name)
    pointers = [view.pointer for view in views if view.pointer is not None and view.pointer.run == name]
    generations = [mark.generation for mark in (*pointers, *(mark for mark, _ in chosen))]
    refusals: dict[Mark, str] = {}
    for mark, rank in chosen:
        tree, refusal = _read_on(rank, group, directory, mark)
        if refusal is not None:
            refusals[mark] = refusal
            if group.rank == rank:
                log.warning("%s Looking for another one.", refusal)
            continue
        state.on_rank(rank, group, "check", partial(_check, run, tree, directory, mark))
        return Found(
            mark=mark,
            tree=state.broadcast_tree(tree, group, "state to go on from", source=rank),
            newest_generation=max(generations),
            bad=tuple(refusals),
        )
    reasons = " ".join(refusals.values()) or f"{directory.address} names {name} but has none of its checkpoints."
    raise _for_all(
        f"no checkpoint in {directory.address} can be read. {reasons} To start anew beside them: Config(resume=False) "
        f"or RAGTAG_RESUME=0.",
        0,
    )


def _read_on(rank: int, group: Group, directory: Directory, mark: Mark) -> tuple[Any, str | None]:
    tree = refusal = None
    if group.rank == rank:
        try:
            tree = directory.load(mark)
        except CheckpointError as error:
            refusal = str(error)
    return tree, group.gather(f"reading {mark.name}", refusal)[rank]


def _check(run: Run, tree: Any, directory: Directory, mark: Mark) -> None:
    try:
        state.check(run, tree, directory.where(mark))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} The directory {directory.address} is that run's: give this one another, with "
            f"Config(checkpoint=...) or --checkpoint, or start anew beside it with Config(resume=False)."
        ) from error


def _for_all(message: str, rank: int) -> CheckpointError:
    error = CheckpointError(message)
    error.origin_rank = rank
    return error
