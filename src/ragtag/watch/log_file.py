"""The file of an event log: whole lines are appended, and it goes on in a new file when it has grown large.

The one idea: every part can be read alone, because it begins with the newest lines that say whose log this is, who
trains and under which plan.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from ragtag.watch.events import Began

PART_BYTES = 64 << 20
_BEGAN, _MEMBERS, _PLAN = b'{"kind":"began"', b'{"kind":"members"', b'{"kind":"plan"'


class LogFile:
    """Appends to `path`; its first lines are in `path` with a number before the suffix: log.1.jsonl, log.2.jsonl, ...

    One writer at a time. Every method raises OSError where the file system refuses.

    Args:
        path: of the newest part; its directory is made.
        part_bytes: about how large a part may grow.
    """

    def __init__(self, path: Path, *, part_bytes: int = PART_BYTES) -> None:
        self.path, self._part_bytes = path, part_bytes
        self._newest: dict[bytes, bytes] = {}
        self._file: BinaryIO | None = None

    def append(self, lines: Sequence[bytes]) -> None:
        """Write `lines`, JSON objects without line ends, all of them or, if the disk is full, some of them."""
        file = self._file or self._open()
        for line in lines:
            for kind in (_BEGAN, _MEMBERS, _PLAN):
                if line.startswith(kind):
                    self._newest[kind] = line
        if lines:
            file.write(b"\n".join(lines) + b"\n")
            file.flush()
        if file.tell() >= self._part_bytes:
            self._go_on_in_a_new_part()

    def close(self) -> None:
        """Close it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "LogFile":
        """Close it at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _open(self) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = file = open(self.path, "ab")  # noqa: SIM115
        if file.tell() and not _ends_with_line_end(self.path):
            file.write(b"\n")  # whoever wrote this line was killed
        return file

    def _go_on_in_a_new_part(self) -> None:
        self.close()
        taken = [number for number, _ in numbered_parts(self.path)]
        os.replace(self.path, part(self.path, max(taken, default=0) + 1))
        file = self._open()
        began = self._newest.get(_BEGAN)
        if began is not None:
            began = msgspec.json.encode(msgspec.structs.replace(msgspec.json.decode(began, type=Began), continued=True))
        kept = (began, self._newest.get(_MEMBERS), self._newest.get(_PLAN))
        file.write(b"".join(line + b"\n" for line in kept if line is not None))
        file.flush()


def part(path: Path, number: int) -> Path:
    """Return where part `number` of the log at `path` lies, counted from 1."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def numbered_parts(path: Path) -> list[tuple[int, Path]]:
    """Return the older parts of the log at `path`, oldest first, with their numbers."""
    found = []
    for file in path.parent.glob(f"{path.stem}.*{path.suffix}"):
        number = file.name[len(path.stem) + 1 : len(file.name) - len(path.suffix)]
        if number.isdigit():
            found.append((int(number), file))
    return sorted(found)


def _ends_with_line_end(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
