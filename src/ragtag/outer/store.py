"""What the outer process keeps on disk: the values and the momentum of each fragment, by version.

The one idea: a version is told to islands only when it is on disk. Files are written beside the old ones, synced, and
named in the journal after that; so a crash at any moment leaves the version before, whole. And what islands fetch is
read from these files piece by piece, so that however many of them fetch, memory holds the values once.
"""

import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch

from ragtag.core.errors import RagtagError
from ragtag.hub.journal import Journal
from ragtag.outer.protocol import Tempo, Wanted

_STATE = "state"


class StoreError(RagtagError, ValueError):
    """What the journal names is not on disk as it was written."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="started"):
    """The outer process has started."""


class Model(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="model"):
    """What is trained, by the first island."""

    model: str
    numel: tuple[int, ...]
    data: str
    batch: int
    wanted: Wanted


class Version(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="version"):
    """A fragment has values of a new version, in `file`."""

    fragment: int
    version: int
    file: str
    """Values, then momentum, fp32."""
    digest: str
    values_digest: str
    """Of the values alone."""
    num_bytes: int
    """Of the values alone."""
    merged: Mapping[str, int] = {}
    """By island, the newest of its deltas in these values."""
    step: float = 0.0


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="opened"):
    """All values are there: islands train."""

    step: int
    num_bytes: int = 0
    digest: str = ""
    """Of the state for newcomers."""


class Tuned(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tuned"):
    """How islands are to go on."""

    tempo: Tempo


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on disk that islands fetch."""

    path: Path
    num_bytes: int
    digest: str

    def pieces(self, size: int, offset: int) -> Iterator[tuple[int, bytes]]:
        """Where each piece begins, and the piece, from `offset` on. The file may be removed meanwhile."""
        with open(self.path, "rb", buffering=0) as file:
            yield 0, b""  # opened: from here on it stays what it is
            for start in range(max(0, offset), self.num_bytes, size):
                yield start, os.pread(file.fileno(), min(size, self.num_bytes - start), start)


Record = Started | Model | Version | Opened | Tuned


class Store:
    """The files of one run's outer loop, in a directory of their own."""

    def __init__(self, directory: Path, *, run: str) -> None:
        """Open it, made where it is missing. Raises JournalError, StoreError."""
        self.directory = directory
        self._journal: Journal[Record] = Journal(directory, run=run, records=Record)
        records = self._journal.records
        self.model = next((each for each in records if isinstance(each, Model)), None)
        self.opened = next((each for each in reversed(records) if isinstance(each, Opened)), None)
        self.tempo = next((each.tempo for each in reversed(records) if isinstance(each, Tuned)), None)
        self.versions = {each.fragment: each for each in records if isinstance(each, Version)}
        """By fragment, the newest."""
        self.epoch = 1 + sum(isinstance(each, Started) for each in records)
        self._journal.append(Started())
        self._remove_others()

    def note(self, record: Record) -> None:
        """Write a record; it is on disk when this returns."""
        self._journal.append(record)

    def load(self, fragment: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and momentum of the newest version of a fragment.

        Raises:
            StoreError: the file is missing or damaged.
        """
        record = self.versions[fragment]
        path = self.directory / record.file
        try:
            data = bytearray(path.read_bytes())
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}. Begin a new run.") from error
        if _digest(data) != record.digest:
            raise StoreError(f"{path} is damaged: its checksum does not fit. Put back a copy, or begin a new run.")
        both = torch.frombuffer(data, dtype=torch.float32).view(2, -1)
        return both[0], both[1]

    def keep(
        self,
        fragment: int,
        version: int,
        values: torch.Tensor,
        momentum: torch.Tensor,
        *,
        merged: Mapping[str, int],
        step: float,
    ) -> None:
        """Write a version; once this returns it may be told. The one before it is removed."""
        parts = [memoryview(each.numpy()).cast("B") for each in (values, momentum)]  # pyright: ignore[reportArgumentType]
        name = f"fragment-{fragment}.{version}"
        _write(self.directory / name, *parts)
        record = Version(
            fragment=fragment,
            version=version,
            file=name,
            digest=_digest(*parts),
            values_digest=_digest(parts[0]),
            num_bytes=len(parts[0]),
            merged=dict(merged),
            step=step,
        )
        self._journal.append(record)
        before, self.versions[fragment] = self.versions.get(fragment), record
        if before is not None and before.file != name:
            (self.directory / before.file).unlink(missing_ok=True)

    def values_of(self, fragment: int) -> Kept:
        """The newest values of a fragment."""
        record = self.versions[fragment]
        return Kept(path=self.directory / record.file, num_bytes=record.num_bytes, digest=record.values_digest)

    def keep_update(self, fragment: int, version: int, data: memoryview) -> Kept:
        """Write what a version has changed, for as long as this process runs."""
        path = self.directory / f"update-{fragment}.{version}"
        path.write_bytes(data)
        return Kept(path=path, num_bytes=len(data), digest=_digest(data))

    def keep_state(self, data: memoryview) -> None:
        """Write the state for newcomers."""
        _write(self.directory / _STATE, data)

    @property
    def state(self) -> Kept:
        """The state for newcomers; once it is `opened`."""
        assert self.opened is not None, "nobody has given it"
        return Kept(path=self.directory / _STATE, num_bytes=self.opened.num_bytes, digest=self.opened.digest)

    def close(self) -> None:
        """Let another process have it."""
        self._journal.close()

    def _remove_others(self) -> None:
        named = {each.file for each in self.versions.values()}
        for path in self.directory.glob("fragment-*"):
            if path.name not in named:
                path.unlink(missing_ok=True)
        for path in self.directory.glob("update-*"):
            path.unlink(missing_ok=True)


def _digest(*parts: "bytes | bytearray | memoryview") -> str:
    whole = blake2b(digest_size=16)
    for part in parts:
        whole.update(part)
    return whole.hexdigest()


def _write(path: Path, *parts: memoryview) -> None:
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
