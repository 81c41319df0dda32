"""Checkpoints that are written while training goes on, over a group of their own.

The one idea: between two steps each rank copies what it holds into host memory, which takes no longer than the copy;
a thread on each then puts the copies together and rank 0 writes them, as if nothing had moved. The thread has ranks
connected once more for itself: on the training's own group its messages would stand between those of a step.
"""

import atexit
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ragtag.checkpoint.parts import Part
from ragtag.checkpoint.tree import flatten_described, unflatten
from ragtag.comm.group import Group
from ragtag.comm.judge import described
from ragtag.core.errors import CheckpointError, PeerError
from ragtag.runtime import state
from ragtag.runtime.run import Run
from ragtag.runtime.zero.snapshot import snapshot_of
from ragtag.runtime.zero.whole import Whole, whole_of

log = logging.getLogger("ragtag")

Write = Callable[[Any, Iterable[Part]], None]


class BackgroundSaver:
    """Of one rank; saves one state after the other.

    Args:
        run: this rank.
        connect: makes the saver's own group, at the first save; a call that all ranks make together.
    """

    def __init__(self, run: Run, connect: Callable[[], Group]) -> None:
        self._run, self._connect = run, connect
        self._group: Group | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._waits_at_exit = False

    def save(self, script: Mapping[str, Any], write: Write) -> None:
        """Copy the state and let go; a call of all ranks where state is cut. Waits for the save before.

        Args:
            write: called on rank 0, on another thread, with the tree and the parts of what it only describes.
        """
        self.wait()
        run, group, whole = self._run, self._run.group, None
        if run.sharding is not None:
            if self._group is None:
                self._group = self._connect()
            group = self._group
            whole = whole_of(*snapshot_of(run.sharding), group)
        elif group.rank != 0:
            return
        tree = None
        if group.rank == 0:
            try:
                tree = _copied(state.collect(run, script, whole))
            except CheckpointError as error:  # the others do not know, and give what they have all the same
                self._error = error
        if self._group is not None or tree is not None:
            self._begin(group, tree, whole, write)

    def _begin(self, group: Group, tree: Any, whole: Whole | None, write: Write) -> None:
        if not self._waits_at_exit:
            self._waits_at_exit = True
            atexit.register(self.close)  # after the groups were guarded, so before they say goodbye
        self._thread = threading.Thread(
            target=self._save, args=(group, tree, whole, write), name="ragtag-saving", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when what was begun is written, or was not and that was said: training goes on."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None and not isinstance(error, PeerError):  # of which the training's own group hears too
            log.warning("%s Training goes on without this checkpoint.", described(error))

    def close(self) -> None:
        """Wait for what was begun, and let go of the group."""
        self.wait()
        if self._waits_at_exit:
            self._waits_at_exit = False
            atexit.unregister(self.close)
        if self._group is not None:
            self._group.close()
            self._group = None

    def _save(self, group: Group, tree: Any, whole: Whole | None, write: Write) -> None:
        try:
            if tree is not None:
                write(tree, () if whole is None else whole.parts)
        except BaseException as error:
            self._error = error
        try:
            for _ in () if whole is None else whole.parts:
                pass  # other ranks give what they have; rank 0 comes here with some left where it could not write
        except BaseException as error:
            self._error = self._error or error


def _copied(tree: Any) -> Any:
    """The tree with tensors of its own, in host memory; what is shared in it stays shared."""
    skeleton, tensors = flatten_described(tree)
    copies = {
        name: each.detach().to("cpu", copy=True) if isinstance(each, torch.Tensor) else each
        for name, each in tensors.items()
    }
    return unflatten(skeleton, copies)
