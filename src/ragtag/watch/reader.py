"""Reads an event log, of a finished run or of one that goes on.

The one idea: a line is an event or it is skipped and counted, so that a log which was cut off, damaged or written by a
newer ragtag still shows everything that can be read.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from ragtag.core.values import DocumentError
from ragtag.watch.events import AnyEvent, Began
from ragtag.watch.log_file import numbered_parts

_BLOCK_BYTES = 1 << 20


class Decoder:
    """Turns lines into events.

    `skipped` counts lines that are none, torn or damaged, and `unknown` those of kinds that this version lacks.
    """

    def __init__(self) -> None:
        self.skipped = self.unknown = 0
        self._decode = msgspec.json.Decoder(AnyEvent).decode

    def decode(self, line: bytes) -> AnyEvent | None:
        """Return the event, or None."""
        try:
            return self._decode(line)
        except msgspec.ValidationError:
            self.unknown += 1
        except (msgspec.DecodeError, UnicodeDecodeError):
            if line.strip():
                self.skipped += 1
        return None


def parts_of(path: Path) -> list[Path]:
    """Return the files of the log at `path`, oldest first.

    Raises:
        DocumentError: there is none.
    """
    parts = [file for _, file in numbered_parts(path)]
    if path.exists():
        parts.append(path)
    if not parts:
        raise DocumentError(f"There is no event log at {path}. `ragtag launch` writes one to runs/run-TIME/log.jsonl.")
    return parts


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a log, over all its parts.

    Raises:
        DocumentError: there is none, or it cannot be read.
    """
    for file in parts_of(path):
        try:
            with open(file, "rb", buffering=_BLOCK_BYTES) as opened:
                yield from opened
        except OSError as error:
            raise DocumentError(f"The event log {file} cannot be read: {error.strerror}.") from error


def read(path: Path, decoder: Decoder | None = None) -> Iterator[AnyEvent]:
    """Yield the events of a log, over all its parts; what a part repeats of the one before it is left out.

    Raises:
        DocumentError: there is none, or it cannot be read.
    """
    decoder = decoder or Decoder()
    for line in read_lines(path):
        event = decoder.decode(line)
        if event is not None and not (isinstance(event, Began) and event.continued):
            yield event


class Follower:
    """Reads a log that goes on: each call of `new` returns what has come since the last one.

    It may not be there yet, and may go on in a new part in between.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.decoder = Decoder()
        self._inode = 0
        self._offset = 0
        self._rest = b""
        self._at_end = True
        self._read: set[int] = set()

    def new(self, most_bytes: int = 64 << 20) -> list[AnyEvent]:
        """Return new events, oldest first, out of at most about that many bytes; none: there are none now."""
        events: list[AnyEvent] = []
        for file in self._files():
            events += self._read_on(file, most_bytes)
            if not self._at_end:
                break
        return events

    def _files(self) -> list[Path]:
        """Parts that are not read to their end, oldest first."""
        files = [*(file for _, file in numbered_parts(self.path)), self.path]
        return [file for file in files if (inode := _inode(file)) and inode not in self._read]

    def _read_on(self, file: Path, most_bytes: int) -> list[AnyEvent]:
        try:
            with open(file, "rb") as opened:
                inode = _inode(file)
                if inode != self._inode or opened.seek(0, 2) < self._offset:  # another part, or written anew
                    self._inode, self._offset, self._rest = inode, 0, b""
                opened.seek(self._offset)
                content = opened.read(most_bytes)
                self._offset += len(content)
                self._at_end = len(content) < most_bytes
        except OSError:
            return []
        *lines, self._rest = (self._rest + content).split(b"\n")
        if self._at_end and file != self.path:
            self._read.add(inode)
            lines, self._rest = [*lines, self._rest], b""
        decoded = [self.decoder.decode(line) for line in lines if line]
        return [event for event in decoded if event and not (isinstance(event, Began) and event.continued)]


def _inode(file: Path) -> int:
    try:
        return file.stat().st_ino
    except OSError:
        return 0
