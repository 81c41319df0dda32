"""Read samples ahead of time in a way that plans may change under.

The one idea: what is prefetched is a *unit*, a run of positions of one step's global batch, addressed by (step,
unit). When a plan changes or a unit is claimed by another rank, what is here and still ours is used, the rest is
dropped and read by its new owner; no order is fixed ahead, so nothing is lost or repeated.
"""

import contextlib
import dataclasses
import heapq
import itertools
import platform
import threading
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import default_collate

from ragtag.core.errors import DataError
from ragtag.core.mixing import seed_for
from ragtag.runtime.batches import map_leaves
from ragtag.runtime.loader_settings import LoaderSettings, check_dataset, loader_settings, worker_context
from ragtag.runtime.loader_worker import Failure, Worker, read_samples
from ragtag.runtime.randomness import preserved_random_state, seed_everything

__all__ = ["Key", "LoaderSettings", "UnitLoader", "check_dataset", "loader_settings"]

Key = tuple[int, int]
"""(step, unit)."""

_USER_CODE_PATIENCE = 10  # user code gets this many times `patience_s`
_TICK_S = 0.1
_COLLATE_STREAM = 1  # keeps collate_fn's random numbers apart from those of sample (epoch, index) = (step, unit)
# Tasks that a worker holds: enough that it never waits for the next one, few enough that they always fit into a pipe
# and that one slow sample holds up few others.
_TASKS_PER_WORKER = 16
_BATCHED_TASKS_PER_WORKER = 2


@dataclasses.dataclass(eq=False)
class _Unit:
    """A requested unit: what it consists of and what of it is here."""

    epoch: int
    indices: tuple[int, ...]
    samples: list[Any]
    num_missing: int
    failure: DataError | None = None
    forgotten: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class _Task:
    """What is read in one go: one sample, or a whole unit where the dataset reads many at once."""

    unit: _Unit
    start: int
    indices: tuple[int, ...]


class UnitLoader:
    """Reads units of samples, in this process (`num_workers=0`, when they are taken) or ahead of time in others.

    Args:
        dataset: anything with `__len__` and `__getitem__`.
        prefetch: how many steps ahead the owner should `request`; the loader reads all that is requested, earliest
            step first.
        device: where batches will go; decides whether `pin_memory` has anything to do.
        seed: the run's. With `seed_samples`, `dataset[i]` runs with torch, NumPy and `random` seeded by (seed, epoch,
            i) and `collate_fn` seeded by (seed, step, unit) of the micro-batch's first unit, so neither depends on
            who reads it.
        patience_s: a sample that takes ten times as long is a DataError.
        check: called about ten times a second while waiting for workers; raise in it to end the wait (a peer has
            failed).

    Workers are forked, where the platform does that, on construction: make the loader before other threads and
    accelerators.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int = 2,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        device: torch.device,
        seed: int,
        seed_samples: bool = True,
        patience_s: float = 30.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.prefetch = prefetch
        self.reads = 0
        """How many samples have been read so far, here or (and received) in workers."""
        self._dataset = dataset
        self._collate = collate_fn or default_collate
        self._pin = pin_memory and device.type != "cpu" and torch.accelerator.is_available()
        self._seed, self._seed_samples = seed, seed_samples
        self._limit_s = patience_s * _USER_CODE_PATIENCE
        self._check = check
        self._reads_many = not seed_samples and callable(getattr(dataset, "__getitems__", None))
        self._units: dict[Key, _Unit] = {}
        self._queue: list[tuple[Key, int, _Task]] = []
        self._counter = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._workers: list[Worker] = []
        try:
            self._start_workers(num_workers, worker_init_fn, worker_context(multiprocessing_context))
        except BaseException:
            self.close()
            raise

    @property
    def reads_ahead(self) -> bool:
        """Whether workers read while the device computes."""
        return bool(self._workers)

    def __contains__(self, key: object) -> bool:
        """Whether unit `key` was requested and not yet taken or forgotten."""
        return key in self._units

    def request(self, key: Key, epoch: int, indices: Sequence[int]) -> None:
        """Say that unit `key` is `dataset[i]` for `indices`; workers start on it. Asking again changes nothing."""
        indices = tuple(indices)
        with self._changed:
            known = self._units.get(key)
            if known is not None:
                assert (known.epoch, known.indices) == (epoch, indices), f"unit {key} was requested with other samples"
                return
            unit = _Unit(epoch, indices, [None] * len(indices), len(indices))
            self._units[key] = unit
            if self._workers:
                for task in self._tasks_of(unit):
                    heapq.heappush(self._queue, (key, next(self._counter), task))
                self._dispatch()

    def take(self, keys: Sequence[Key]) -> Any:
        """Return one micro-batch, the samples of the requested units `keys` in order, collated; then forget the units.

        Whoever needs a unit again (after running out of memory) requests it again, and it is read again.

        Raises:
            DataError: a sample or `collate_fn` failed, a sample took ten times `patience_s`, or a worker died.
        """
        units = [self._units[key] for key in keys]
        # One preservation for samples and collation together: it costs as much as reading a small sample.
        with preserved_random_state() if self._seed_samples else contextlib.nullcontext():
            if self._workers:
                self._wait_for(units)
            else:
                self._read_here(units)
            samples = [sample for unit in units for sample in unit.samples]
            with self._changed:
                for key in keys:
                    del self._units[key]
            batch = self._collated(samples, keys[0], units)
        return map_leaves(batch, _pinned) if self._pin else batch

    def keep(self, mine: Collection[Key] | Callable[[Key], bool]) -> None:
        """Forget all requested units but `mine`: another rank reads them."""
        is_mine = mine if callable(mine) else mine.__contains__
        with self._changed:
            for key in [key for key in self._units if not is_mine(key)]:
                self._units.pop(key).forgotten = True

    def close(self) -> None:
        """End and join the workers; again: nothing."""
        with self._changed:
            self._closed = True
        for worker in self._workers:
            worker.ask_to_end()
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    # ---- in this process

    def _read_here(self, units: Sequence[_Unit]) -> None:
        for unit in units:
            for task in self._tasks_of(unit):
                self.reads += len(task.indices)
                seed = self._seed if self._seed_samples else None
                try:
                    samples = read_samples(self._dataset, unit.epoch, task.indices, seed)
                except Exception as error:
                    raise DataError(f"{_called(task)} failed in epoch {unit.epoch}: {_brief(error)}") from error
                self._store(task, samples)

    def _collated(self, samples: list[Any], first: Key, units: Sequence[_Unit]) -> Any:
        try:
            if self._seed_samples:
                seed_everything(seed_for(self._seed, *first, _COLLATE_STREAM))
            return self._collate(samples)
        except Exception as error:
            indices = [index for unit in units for index in unit.indices]
            raise DataError(
                f"collate_fn failed on the samples {_listed(indices)} (step {first[0]}): {_brief(error)}. Samples of "
                f"unequal shapes, or that are no tensors, arrays or numbers, need loader={{'collate_fn': ...}}."
            ) from error

    # ---- in workers

    def _start_workers(self, num_workers: int, init_fn: Callable[[int], Any] | None, context: BaseContext) -> None:
        for number in range(num_workers):
            try:
                worker = Worker(
                    context,
                    number=number,
                    num_workers=num_workers,
                    dataset=self._dataset,
                    seed=self._seed,
                    seed_samples=self._seed_samples,
                    init_fn=init_fn,
                    on_answer=self._on_answer,
                    on_end=self._on_end,
                )
            except Exception as error:
                raise DataError(
                    f"cannot start loader worker {number} of {num_workers}: {_brief(error)}. If something cannot be "
                    f"pickled, define the dataset and its functions at the top level of a module; or use num_workers=0."
                ) from error
            self._workers.append(worker)
        for worker in self._workers:
            worker.start_receiving()

    def _dispatch(self) -> None:
        """Hand queued tasks to the workers that have the least to do; the caller holds the lock."""
        most = _BATCHED_TASKS_PER_WORKER if self._reads_many else _TASKS_PER_WORKER
        while self._queue and not self._closed:
            worker = min(self._workers, key=lambda worker: (worker.ended, len(worker.outstanding)))
            if worker.ended or len(worker.outstanding) >= most:
                return
            _, _, task = heapq.heappop(self._queue)
            if not task.unit.forgotten:
                worker.send(task, task.unit.epoch, task.indices)

    def _on_answer(self, worker: Worker, answer: list[Any] | Failure) -> None:
        with self._changed:
            task = worker.outstanding.popleft()
            worker.busy_since = time.monotonic()
            self.reads += len(task.indices)
            if isinstance(answer, Failure):
                task.unit.failure = DataError(
                    f"{_called(task)} failed in epoch {task.unit.epoch}, in loader worker {worker.pid} on "
                    f"{platform.node()}:\n{answer.text}"
                )
                task.unit.failure.__cause__ = answer.cause()
            else:
                try:
                    self._store(task, answer)
                except DataError as error:
                    task.unit.failure = error
            self._dispatch()
            if task.unit.failure or not task.unit.num_missing:
                self._changed.notify_all()

    def _on_end(self, worker: Worker) -> None:
        with self._changed:
            worker.ended = True
            self._changed.notify_all()

    def _wait_for(self, units: Sequence[_Unit]) -> None:
        began = checked = time.monotonic()
        while True:
            with self._changed:
                self._raise_failures(units, began)
                if not any(unit.num_missing for unit in units):
                    return
                self._changed.wait(_TICK_S)
            if time.monotonic() - checked >= _TICK_S:
                self._check()
                for worker in self._workers:
                    worker.poll()
                checked = time.monotonic()

    def _raise_failures(self, units: Sequence[_Unit], began: float) -> None:
        for unit in units:
            if unit.failure:
                raise unit.failure
        now = time.monotonic()
        for worker in self._workers:
            task = worker.outstanding[0] if worker.outstanding else None
            if worker.ended:
                reading = f" while it read {_called(task)} in epoch {task.unit.epoch}" if task else ""
                raise DataError(
                    f"loader worker {worker.pid} on {platform.node()} {worker.describe_end()}{reading}. "
                    f"To see an error in the dataset itself, run once with loader={{'num_workers': 0}}."
                )
            if task and now - max(worker.busy_since, began) > self._limit_s:
                raise DataError(
                    f"{_called(task)} has not returned for {self._limit_s:g} s in loader worker {worker.pid} on "
                    f"{platform.node()} (epoch {task.unit.epoch}). Check the disk or network it reads from; samples "
                    f"that do take that long need a larger patience_s (they get ten times as long)."
                )

    # ---- both

    def _tasks_of(self, unit: _Unit) -> list[_Task]:
        if self._reads_many:
            return [_Task(unit, 0, unit.indices)]
        return [_Task(unit, position, (index,)) for position, index in enumerate(unit.indices)]

    def _store(self, task: _Task, samples: list[Any]) -> None:
        if len(samples) != len(task.indices):
            raise DataError(f"{_called(task)} returned {len(samples)} samples, not {len(task.indices)}.")
        task.unit.samples[task.start : task.start + len(samples)] = samples
        task.unit.num_missing -= len(samples)


def _pinned(leaf: Any) -> Any:
    return leaf.pin_memory() if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" else leaf


def _called(task: _Task) -> str:
    if len(task.indices) == 1:
        return f"dataset[{task.indices[0]}]"
    return f"dataset.__getitems__([{_listed(task.indices)}])"


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(str(index) for index in indices[:8]) + (", ..." if len(indices) > 8 else "")


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
