"""Finding a state to go on from, with all ranks: whichever rank can see the newest one reads it and sends it round.

The one idea: a checkpoint may lie on one machine only, and after a restart that may be any rank's; so ranks first tell
each other what they see, and then all of them know, without another word, who is to read what.
"""

import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from ragtag.checkpoint.directory import Directory, Mark, View, candidates, run_to_continue
from ragtag.checkpoint.file import SavedFile, checked, load_outline
from ragtag.checkpoint.parts import Part
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
    parts: Any
    """What `state.restore` takes besides the tree: an iterable of `Part`."""
    newest_generation: int
    """Of any checkpoint of that run, whether it could be read or not."""
    bad: tuple[Mark, ...] = ()
    """Newer ones, which could not be read."""


def read_file(run: Run, path: str | os.PathLike[str]) -> tuple[Any, Iterable[Part]]:
    """Return the checked tree in `path`, on every rank, from the lowest rank whose file of that name is the newest; and
    what `state.restore` takes besides.

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
        content = _content(run, lambda: storage.load(name), lambda: storage.open(name))
        _fitting(run, content, str(path))
        return content

    content = state.on_rank(rank, group, "read", read)
    return _of_all(run, content, "loaded values", rank)


def _content(run: Run, load: Callable[[], Any], open_file: Callable[[], SavedFile]) -> Any:
    """The tree in a file; or, where no rank is to hold all of it, the file, open and undamaged."""
    if run.sharding is None:
        return load()
    return checked(open_file())


def _fitting(run: Run, content: Any, source: str) -> None:
    """Raise CheckpointError if `content` is of another model, optimizer or run."""
    if not isinstance(content, SavedFile):
        state.check(run, content, source)
        return
    try:
        state.check(run, content.tree, source)
    except BaseException:
        content.close()
        raise


def _of_all(run: Run, content: Any, name: str, source: int) -> tuple[Any, Iterable[Part]]:
    """The tree that rank `source` has, on every rank, and its parts, where it comes in parts; a call of the group."""
    if run.sharding is None:
        return state.broadcast_tree(content, run.group, name, source=source), ()
    return state.streamed(content, run.group, name, source)


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
        content, refusal = _read_on(rank, run, directory, mark)
        if refusal is not None:
            refusals[mark] = refusal
            if group.rank == rank:
                log.warning("%s Looking for another one.", refusal)
            continue
        state.on_rank(rank, group, "check", partial(_check, run, content, directory, mark))
        tree, parts = _of_all(run, content, "state to go on from", rank)
        return Found(
            mark=mark,
            tree=tree,
            parts=parts,
            newest_generation=max(generations),
            bad=tuple(refusals),
        )
    reasons = " ".join(refusals.values()) or f"{directory.address} names {name} but has none of its checkpoints."
    raise _for_all(
        f"no checkpoint in {directory.address} can be read. {reasons} To start anew beside them: Config(resume=False) "
        f"or RAGTAG_RESUME=0.",
        0,
    )


def _read_on(rank: int, run: Run, directory: Directory, mark: Mark) -> tuple[Any, str | None]:
    content = refusal = None
    if run.group.rank == rank:
        try:
            content = _content(run, lambda: directory.load(mark), lambda: directory.open(mark))
        except CheckpointError as error:
            refusal = str(error)
    return content, run.group.gather(f"reading {mark.name}", refusal)[rank]


def _check(run: Run, content: Any, directory: Directory, mark: Mark) -> None:
    try:
        _fitting(run, content, directory.where(mark))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} The directory {directory.address} is that run's: give this one another, with "
            f"Config(checkpoint=...) or --checkpoint, or start anew beside it with Config(resume=False)."
        ) from error


def _for_all(message: str, rank: int) -> CheckpointError:
    error = CheckpointError(message)
    error.origin_rank = rank
    return error
