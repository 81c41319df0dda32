"""The hub's memory on disk: JSON lines that are only ever appended to, each synced before the call returns.

The one idea: every line carries a checksum over itself and all lines before it, so a record that was lost, changed or
moved is found, with its line. Only a last line without its end, which a crash tears, is dropped: nobody saw it.
"""

import fcntl
import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec

from ragtag.core.errors import RagtagError

FILE_NAME = "hub.journal"
"""What the journal is called in a run's directory."""
SCHEMA = 1
"""Version of the journals that are written here; no other is read."""

Record = TypeVar("Record")


class JournalError(RagtagError, ValueError):
    """A run's journal is in use, damaged, of another run, or cannot be written: file, line and what to type next."""


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    checksum: str
    record: msgspec.Raw


class _Opening(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="ragtag journal"):
    schema: int
    run: str


class Journal(Generic[Record]):
    """The records of one run's hub, open for appending and locked against a second hub (`flock`)."""

    def __init__(self, directory: Path, *, run: str, records: Any) -> None:
        """Open the journal of `run` in `directory`, made where it is missing, and read what it holds.

        `records` is the type of the records: a tagged msgspec struct or a union of them.

        Raises:
            JournalError: another hub has it open, it is damaged or of another run, or the directory cannot be used.
        """
        self.path = directory / FILE_NAME
        self._records_type = records
        self._checksum = ""
        self._length_bytes = 0
        self._broken = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise JournalError(f"{self.path} cannot be opened: {error.strerror}. Name another --run-dir.") from error
        try:
            self._lock()
            self.records: tuple[Record, ...] = self._read(run)
            """What was journalled before this hub started."""
        except BaseException:
            os.close(self._file)
            raise

    def append(self, *records: Record) -> None:
        """Write `records` in order; they are on the disk when this returns. A crash before may keep the first of them.

        Raises:
            JournalError: the disk does not take them; nothing can be appended any more.
        """
        if self._broken:
            raise JournalError(f"{self.path} could not be written before; start the hub again.")
        lines, checksum = b"", self._checksum
        for record in records:
            line, checksum = _line(record, checksum)
            lines += line
        try:
            _write(self._file, lines, self._length_bytes)
            os.fsync(self._file)
        except OSError as error:
            self._broken = True
            self._forget_after(self._length_bytes)
            raise JournalError(
                f"{self.path} cannot be written: {error.strerror}. Everything before is intact: make room or mend the "
                "disk, and start the hub again with the same --run-dir."
            ) from error
        self._checksum = checksum
        self._length_bytes += len(lines)

    def close(self) -> None:
        """Let another hub have it. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(
                f"Another hub is running this run: it has {self.path} open. A run has one hub: end that one first, or "
                "start this one with another --run-dir."
            ) from None
        except OSError as error:
            raise JournalError(
                f"{self.path} cannot be locked ({error.strerror}), so two hubs could run one run. Name a --run-dir on "
                "a local disk."
            ) from error

    def _read(self, run: str) -> tuple[Record, ...]:
        with os.fdopen(os.dup(self._file), "rb") as file:
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole:
            self._begin(run, content)
            return ()
        raws = list(self._checked(whole.split(b"\n")[:-1]))
        self._check_opening(raws[0], run)
        decoder = msgspec.json.Decoder(self._records_type)
        records = []
        for number, raw in enumerate(raws[1:], start=2):
            try:
                records.append(decoder.decode(raw))
            except msgspec.DecodeError as error:
                raise JournalError(
                    f"{self.path}, line {number}: a record that this version of ragtag does not know ({error}). Start "
                    "the hub with the version that wrote it, or begin a new run with another --run-dir."
                ) from error
        self._length_bytes = len(whole)
        if len(content) > len(whole):
            # Appending after a torn line would make it a damaged one in the middle.
            self._forget_after(len(whole))
        return tuple(records)

    def _checked(self, lines: list[bytes]) -> Iterable[bytes]:
        decoder = msgspec.json.Decoder(_Line)
        for number, text in enumerate(lines, start=1):
            try:
                line = decoder.decode(text)
            except msgspec.DecodeError:
                raise self._damaged(number) from None
            record = bytes(line.record)
            expected = _checksum(record, self._checksum)
            # Compared as written, so that not even a blank can differ.
            if text != _text(expected, record):
                raise self._damaged(number)
            self._checksum = expected
            yield record

    def _damaged(self, number: int) -> JournalError:
        return JournalError(
            f"{self.path}, line {number}: damaged, the checksum does not fit. Nothing was changed. Put back a copy, or "
            "begin a new run with another --run-dir, from the last checkpoint."
        )

    def _begin(self, run: str, torn: bytes) -> None:
        line, checksum = _line(_Opening(schema=SCHEMA, run=run), "")
        if not line.startswith(torn):
            raise self._damaged(1)
        try:
            _write(self._file, line, 0)
            os.fsync(self._file)
            # The file's name is on the disk only once its directory is.
            directory = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise JournalError(f"{self.path} cannot be written: {error.strerror}. Name another --run-dir.") from error
        self._checksum, self._length_bytes = checksum, len(line)

    def _check_opening(self, raw: bytes, run: str) -> None:
        try:
            opening = msgspec.json.decode(raw, type=_Opening)
        except msgspec.DecodeError:
            raise JournalError(f"{self.path} is no journal of a ragtag hub. Name another --run-dir.") from None
        if opening.schema != SCHEMA:
            raise JournalError(
                f"{self.path} was written as version {opening.schema}; this ragtag reads version {SCHEMA}. Start the "
                "hub with the version that wrote it, or begin a new run with another --run-dir."
            )
        if opening.run != run:
            raise JournalError(
                f"{self.path} belongs to the run '{opening.run}', not to '{run}'. Name that run, or another --run-dir."
            )

    def _forget_after(self, length_bytes: int) -> None:
        try:
            os.ftruncate(self._file, length_bytes)
        except OSError:
            # What is left is a torn last line, or refused by its checksum; nothing was promised on it.
            pass


def _line(record: Any, before: str) -> tuple[bytes, str]:
    raw = msgspec.json.encode(record)
    checksum = _checksum(raw, before)
    return _text(checksum, raw) + b"\n", checksum


def _text(checksum: str, raw: bytes) -> bytes:
    return msgspec.json.encode(_Line(checksum=checksum, record=msgspec.Raw(raw)))


def _checksum(raw: bytes, before: str) -> str:
    return blake2b(before.encode() + raw, digest_size=8).hexdigest()


def _write(file: int, content: bytes, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written
