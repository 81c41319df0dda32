"""A run that keeps its own checkpoints: it goes on from the newest one, writes more, and ends with one.

The one idea: between two steps nothing is in flight, so rank 0 can write what all ranks hold without a word to them;
when, the votes have said (`boundary.py`). Only at the end do ranks wait for each other, until it is on disk; and where
state is cut into slices, each time, since each has to give its own.
"""

import logging
import os
import secrets
import signal
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

from ragtag.checkpoint.directory import Directory, History, Mark
from ragtag.checkpoint.parts import Part
from ragtag.checkpoint.storage import open_storage
from ragtag.checkpoint.tree import flatten_described
from ragtag.comm import process_exit
from ragtag.comm.elastic import ElasticGroup
from ragtag.comm.rendezvous import connect
from ragtag.core.errors import CheckpointError, RagtagError, SettingError
from ragtag.runtime import resuming, state
from ragtag.runtime.background import BackgroundSaver
from ragtag.runtime.boundary import Boundary
from ragtag.runtime.run import Run
from ragtag.runtime.script import ScriptPosition
from ragtag.runtime.stop_signals import SIGNALS, Stopped, StopSignals, tell_launcher

log = logging.getLogger("ragtag")


class Keeper(Protocol):
    """Who is asked between two steps."""

    def at_boundary(self) -> None:
        """Do what the votes have decided. Raises Stopped on every rank where they end."""
        ...

    def next_history(self) -> History | None:
        """The history of what follows a state that is loaded by hand, the same on every rank: a call of the group."""
        ...

    def loaded(self, history: History | None) -> None:
        """All ranks have loaded a state by hand: `history` begins."""
        ...

    def close(self) -> None:
        """Give the signals back."""
        ...


class NotKept:
    """No `checkpoint` is set: nothing is automatic, but that a process leaves which is told to."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._signals = signals_of(run, "") if run.group.elastic else None

    def at_boundary(self) -> None:
        """Leave where that was asked for."""
        if self._signals is not None and self._run.boundary.leave_agreed:
            leave(self._run, self._signals)

    def next_history(self) -> None:
        """There is none."""

    def loaded(self, history: History | None) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Give the signals back."""
        if self._signals is not None:
            self._signals.close()


def begin(run: Run, script: ScriptPosition) -> None:
    """Go on from the newest checkpoint where there is one, with all ranks; nothing to do for a run that keeps none.

    Raises:
        SettingError: when to keep is set, but not where.
        CheckpointError: on every rank alike: the directory cannot be used, nothing in it can be read, it is another
            run's, or `state` holds something that no checkpoint can.
    """
    config, group = run.config, run.group
    if config.checkpoint is None:
        if config.checkpoint_every_steps is not None:
            raise SettingError(
                f"checkpoint_every_steps={config.checkpoint_every_steps} says when, but nothing says where. "
                f"Add Config(checkpoint=DIRECTORY) or RAGTAG_CHECKPOINT."
            )
        return
    directory = Directory(open_storage(config.checkpoint))
    whole = None if run.sharding is None else run.sharding.whole()
    flatten_described(state.collect(run, script.state_dict(), whole))  # better now than after ten minutes
    state.on_rank(0, group, "prepare checkpoints", directory.prepare)
    found = resuming.read_newest(run, directory) if config.resume else None
    if found is None:
        run.history = _new_history(run)
        return
    state.restore(run, found.tree, directory.where(found.mark), found.parts)
    script.load_state_dict(found.tree["script"], committed=found.tree["committed"], replay=True)
    if group.rank == 0:
        log.info("going on from %s: %d steps are done", directory.where(found.mark), run.committed)
    run.history = History(run=found.mark.run, generation=found.newest_generation + 1, bad=found.bad)


def keeper(run: Run, script: ScriptPosition) -> Keeper:
    """Return who keeps checkpoints of `run` from now on, under the names that its history gives them."""
    return NotKept(run) if run.history is None else Keeping(run, script)


def signals_of(run: Run, kept_in: str) -> StopSignals:
    """Hear the signals that ask this process to end after a step, from now on.

    Ctrl-C only where checkpoints are kept, and not on a guest's machine, where it is for that machine alone; SIGTERM
    where checkpoints are kept, or others go on without this process.

    Args:
        run: this rank.
        kept_in: where checkpoints are kept; empty: nowhere.
    """
    group, guest = run.group, os.environ.get("RAGTAG_GUEST") == "1"
    numbers = {number for number in SIGNALS if kept_in or (group.elastic and number == signal.SIGTERM)}
    if guest:
        numbers &= {signal.SIGTERM}

    def given_up(number: signal.Signals) -> None:
        """No step boundary has come; on a thread of the signals'."""
        alone = group.elastic and number == signal.SIGTERM
        kept = f" without a new checkpoint; what was kept before is in {kept_in}" if kept_in else ""
        said = (
            f"rank {group.rank} ({group.hosts[group.rank]}) was to {'leave' if alone else 'end'} by {number.name}, but "
            f"no step ended within patience_s = {group.patience_s:g} s (step {group.step}, {group.doing}), so it ends "
            f"at once{kept}"
        )
        log.warning("%s.", said)
        process_exit.ending_with(128 + number)
        if not alone:
            group.announce_failure(RagtagError(said), group.doing)

    signals = StopSignals(run.boundary, group.patience_s, given_up, numbers=numbers, is_for_one=group.elastic)
    if numbers:
        signals.install()
    return signals


def leave(run: Run, signals: StopSignals) -> None:
    """End this process between two steps, and no other. Raises Stopped."""
    signals.reached_boundary()
    go_on = "the others go on" if run.group.world_size > 1 else "nobody else is in the run"
    log.warning(
        "rank %d (%s) leaves by SIGTERM after step %d; %s.",
        run.group.rank,
        run.group.hosts[run.group.rank],
        run.committed,
        go_on,
    )
    process_exit.ending_with(128 + signal.SIGTERM)
    raise Stopped(128 + signal.SIGTERM)


class Keeping:
    """Writes checkpoints at step boundaries, and hears Ctrl-C and SIGTERM."""

    def __init__(self, run: Run, script: ScriptPosition) -> None:
        config, group = run.config, run.group
        assert config.checkpoint is not None, "who keeps no checkpoints has no history"
        self._run, self._script = run, script
        self._directory = Directory(open_storage(config.checkpoint))
        self._last: Mark | None = None
        run.boundary = Boundary(every_s=config.checkpoint_every_s, every_steps=config.checkpoint_every_steps)
        self._background: BackgroundSaver | None = None
        if config.checkpoint_in_background and not group.elastic:
            self._background = BackgroundSaver(run, partial(connect, group.patience_s))
        self._signals = signals_of(run, self._directory.address)
        tell_launcher(os.environ, group.patience_s)

    def at_boundary(self) -> None:
        """Write a checkpoint if one is due; end where a signal has asked for it, with one."""
        run, boundary = self._run, self._run.boundary
        if boundary.stop_agreed:
            self._stop(signal.Signals(boundary.stop_agreed))
        if boundary.save_agreed:
            try:
                self._save()
            except CheckpointError as error:
                if run.group.rank == 0:
                    log.warning("step %d: %s Training goes on without this checkpoint.", run.committed, error)
            boundary.saved()
            run.save_first = False
        if boundary.leave_agreed:
            leave(run, self._signals)

    def next_history(self) -> History:
        """What comes now does not follow from what this run has kept, so it gets names of its own."""
        return _new_history(self._run)

    def loaded(self, history: History | None) -> None:
        """`history` begins."""
        self._run.history, self._last = history, None

    def close(self) -> None:
        """Wait for what is being written, and give the signals back."""
        if self._background is not None:
            self._background.close()
        self._signals.close()

    def _save(self, *, waits: str = "") -> None:
        """Write a checkpoint of this step, if there is none yet; see `state.save`."""
        run, history, mark = self._run, self._run.history, self._mark
        assert history is not None
        committed, beside = self._run.committed, self._background is not None and not waits

        def write(tree: Any, parts: Iterable[Part]) -> None:
            if mark == self._last:
                return
            if not beside:
                run.group.note(committed, f"writing the checkpoint {mark.name}")
            began_s = time.monotonic()
            keep = run.config.checkpoint_keep
            self._directory.save(mark, tree, parts=parts, keep=keep, bad=history.bad, confirm=run.group.confirm)
            self._last = mark
            if isinstance(run.group, ElasticGroup):
                run.group.checkpointed(committed, self._directory.where(mark))
            run.recorder.saved(committed, self._directory.where(mark), time.monotonic() - began_s)
            log.info("step %d: saved %s", committed, self._directory.where(mark))

        if self._background is not None:
            if beside:
                self._background.save(self._script.state_dict(), write)
                return
            self._background.wait()
        state.save(run, self._script.state_dict(), write, waits=waits)

    @property
    def _mark(self) -> Mark:
        """Of a checkpoint of this step."""
        run, history = self._run, self._run.history
        assert history is not None
        return Mark(run=history.run, generation=history.generation + run.generation, step=run.committed)

    def _stop(self, number: signal.Signals) -> None:
        run, group = self._run, self._run.group
        self._signals.reached_boundary()
        group.note(run.committed, "waiting for the last checkpoint")
        try:
            self._save(waits="last checkpoint")
            if group.rank == 0:
                log.warning(
                    "stopped by %s after step %d, which is saved in %s; the same command goes on from there.",
                    number.name,
                    run.committed,
                    self._directory.where(self._mark),
                )
        except CheckpointError as error:
            if group.rank == 0:
                log.error("stopped by %s after step %d: %s %s", number.name, run.committed, error, self._newest())
        run.recorder.ended(run.committed, f"stopped by {number.name}")
        process_exit.ending_with(128 + number)
        raise Stopped(128 + number)

    def _newest(self) -> str:
        try:
            pointer = self._directory.pointer()
        except RagtagError:
            pointer = None
        return "There is none yet." if pointer is None else f"The newest is {self._directory.where(pointer)}."


def _new_history(run: Run) -> History:
    """A name that no other run has, later than those of runs that began before; the same on every rank."""
    own = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
    return History(run=run.group.gather("name of the run", own)[0])
