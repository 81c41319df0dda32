"""A directory of one run's newest checkpoints, and of other runs', which it never touches.

The one idea: a checkpoint has a name of its own, made of run, step and generation; only when it is complete does the
pointer move to it, and only then are older ones removed. So whatever happens in between, there is a whole one.
"""

import logging
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ragtag.checkpoint.file import SavedFile, checked
from ragtag.checkpoint.parts import Part
from ragtag.checkpoint.storage import Storage
from ragtag.core.errors import CheckpointError

log = logging.getLogger("ragtag")

POINTER = "latest.json"
_NAME = re.compile(r"(?P<run>[0-9a-z-]+)\.step-(?P<step>\d+)\.generation-(?P<generation>\d+)\.safetensors")
_PARTIAL = re.compile(rf"\.(?P<name>{_NAME.pattern})\.[0-9a-f]+\.partial")


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoint: one name, never used for two states."""

    run: str
    """Runs that began later sort later."""
    generation: int
    """Counts how often the run was started again, so that what a later start wrote is newer, whatever its step."""
    step: int
    """Steps that were committed."""

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.run}.step-{self.step:08d}.generation-{self.generation}.safetensors"

    @property
    def age(self) -> tuple[int, int]:
        """Orders the checkpoints of one run."""
        return self.generation, self.step


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """What the pointer's file holds."""

    checkpoint: Mark
    checksum: int

    @classmethod
    def to(cls, mark: Mark) -> "Pointer":
        """Return the pointer to a checkpoint."""
        return cls(checkpoint=mark, checksum=zlib.crc32(msgspec.json.encode(mark)))


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Which run this is, and how often it was started: what the names of its checkpoints are made of."""

    run: str
    generation: int = 0
    bad: tuple[Mark, ...] = ()
    """Checkpoints of it that cannot be read."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine sees of a directory."""

    pointer: Mark | None = None
    files: Mapping[str, str] = {}
    """Names of checkpoints, each with what tells two files of that name on two machines apart."""
    refusal: str | None = None
    """Why it sees nothing."""


def mark_of(name: str) -> Mark | None:
    """Return which checkpoint a file of that name is; None: it is something else."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return Mark(run=found["run"], generation=int(found["generation"]), step=int(found["step"]))


def run_to_continue(views: Sequence[View]) -> str | None:
    """Return the run that pointers name, the one that began last if they differ; without any, that of all files."""
    named = [view.pointer.run for view in views if view.pointer is not None]
    found = [mark.run for view in views for name in view.files if (mark := mark_of(name)) is not None]
    return max(named or found, default=None)


def candidates(views: Sequence[View], run: str) -> list[tuple[Mark, int]]:
    """Return the checkpoints of `run`, newest first, each with the rank that is to read it.

    That is the lowest rank that sees it. Another rank comes next where it sees another file of that name.
    """
    chosen: list[tuple[Mark, int]] = []
    seen = set()
    for rank, view in enumerate(views):
        for name, identity in view.files.items():
            mark = mark_of(name)
            if mark is not None and mark.run == run and (name, identity) not in seen:
                seen.add((name, identity))
                chosen.append((mark, rank))
    return sorted(chosen, key=lambda each: (each[0].generation, each[0].step, -each[1]), reverse=True)


class Directory:
    """Checkpoints in a storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.address = storage.address

    def prepare(self) -> None:
        """Make it. Raises CheckpointError where it could not be written to."""
        self._storage.prepare()

    def view(self, most: int = 100) -> View:
        """What is here, of each run the `most` newest."""
        try:
            names = self._storage.names()
        except CheckpointError as error:
            return View(refusal=str(error))
        marks = sorted(filter(None, map(mark_of, names)), key=lambda mark: (mark.run, mark.age), reverse=True)
        counts: dict[str, int] = {}
        files = {}
        for mark in marks:
            counts[mark.run] = counts.get(mark.run, 0) + 1
            if counts[mark.run] <= most:
                files[mark.name] = names[mark.name]
        return View(pointer=self.pointer(), files=files)

    def pointer(self) -> Mark | None:
        """The newest checkpoint that is known to be complete; None: there is no pointer, or it cannot be read."""
        text = self._storage.read_text(POINTER)
        try:
            pointer = None if text is None else msgspec.json.decode(text, type=Pointer)
        except msgspec.DecodeError:
            return None
        return None if pointer is None or pointer != Pointer.to(pointer.checkpoint) else pointer.checkpoint

    def where(self, mark: Mark) -> str:
        """A checkpoint's address, as a person writes it."""
        return f"{self.address.rstrip('/')}/{mark.name}"

    def load(self, mark: Mark) -> Any:
        """Read and check a checkpoint. Raises CheckpointError."""
        return self._storage.load(mark.name)

    def open(self, mark: Mark) -> SavedFile:
        """Open a checkpoint, to be read part by part and closed. Raises CheckpointError."""
        return self._storage.open(mark.name)

    def save(
        self,
        mark: Mark,
        tree: Any,
        *,
        keep: int,
        parts: Iterable[Part] = (),
        bad: Collection[Mark] = (),
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a checkpoint, move the pointer to it, and remove the run's older ones but the newest `keep`.

        `parts` are those of the tensors that are described only. Those in `bad` do not count among the ones that stay.
        `confirm` is called before anything takes the place of what is there, and raises where others have gone on
        without this process.

        Raises:
            CheckpointError: it could not be written, or the pointer not moved; or the pointer is ahead already: others
                have gone on without this process. What was there before is untouched.
        """
        self._refuse_if_behind(mark)
        self._storage.save(mark.name, tree, confirm, parts=parts)
        confirm()  # writing may have taken long, and a storage without renaming replaces while it writes
        self._refuse_if_behind(mark)
        self._storage.write_text(POINTER, msgspec.json.encode(Pointer.to(mark)).decode())
        try:
            self._remove_older(mark, keep, bad)
        except CheckpointError as error:
            log.warning("%s", error)

    def _refuse_if_behind(self, mark: Mark) -> None:
        pointer = self.pointer()
        if pointer is not None and pointer.run == mark.run and pointer.age > mark.age:
            raise CheckpointError(
                f"{self.address} has a newer checkpoint of this run already, {pointer.name}: another process has gone "
                f"on without this one, so {mark.name} is not kept. Is the script running twice? Then end one of them."
            )

    def _remove_older(self, newest: Mark, keep: int, bad: Collection[Mark]) -> None:
        names = self._storage.names()
        marks = sorted(
            (mark for name in names if (mark := mark_of(name)) is not None and mark.run == newest.run),
            key=lambda mark: mark.age,
            reverse=True,
        )
        staying = [mark for mark in marks if mark not in bad][:keep]
        for mark in marks if staying else []:
            if mark.age < staying[-1].age:
                self._storage.remove(mark.name)
        for name in names:
            # Left behind by a process that was killed while it was writing.
            partial = _PARTIAL.fullmatch(name)
            if partial and (mark := mark_of(partial["name"])) and mark.run == newest.run and mark.age <= newest.age:
                self._storage.remove(name)


def newest_open(directory: Directory) -> tuple[Mark, SavedFile]:
    """Return the newest checkpoint that can be read, checked and open, for whoever is alone with it; damaged ones are
    warned of.

    Raises:
        CheckpointError: there is none.
    """
    view = directory.view()
    if view.refusal is not None:
        raise CheckpointError(view.refusal)
    run = run_to_continue([view])
    for mark, _ in candidates([view], run) if run is not None else []:
        try:
            return mark, checked(directory.open(mark))
        except CheckpointError as error:
            log.warning("%s The one before it is used.", error)
    raise CheckpointError(f"there is no checkpoint in {directory.address} that can be read.")


def newest_good(directory: Directory) -> tuple[Mark, Any]:
    """Return the newest checkpoint that can be read, and what it holds; see `newest_open`."""
    mark, saved = newest_open(directory)
    with saved:
        return mark, saved.load()
