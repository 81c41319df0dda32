"""What was measured before: one JSON file a device and model, used again for 30 days.

The one idea: the key holds everything that changes the numbers (device, model, data, settings, versions), so a file is
either right or not found; age is the only judgement.
"""

import contextlib
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from ragtag.core.profile import Block, DeviceProfile

SCHEMA = 2
MAX_AGE_S = 30 * 86400.0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One device's numbers; blocks where this device measured them."""

    schema: int = SCHEMA
    device: DeviceProfile
    blocks: tuple[Block, ...] = ()
    optimizer_bytes: int = 0


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Return where measurements are kept: $XDG_CACHE_HOME/ragtag, by default ~/.cache/ragtag."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path(environ.get("HOME", "~")).expanduser() / ".cache") / "ragtag"


def key_of(facts: Mapping[str, Any]) -> str:
    """Return a hash of facts, whatever their order; they are what JSON can hold."""
    return blake2b(msgspec.json.encode([SCHEMA, dict(facts)], order="sorted"), digest_size=16).hexdigest()


class Cache:
    """Entries by key in one directory. Nothing here ever fails a run: what cannot be read is measured again.

    Args:
        directory: made when something is stored.
        now_s: seconds since 1970.
    """

    def __init__(self, directory: Path, now_s: float) -> None:
        self._directory = directory
        self._now_s = now_s

    def find(self, key: str) -> Entry | None:
        """Return the entry, or None: there is none, it is damaged, or it is older than 30 days or from the future."""
        try:
            entry = msgspec.json.decode(self._file(key).read_bytes(), type=Entry)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        age_s = self._now_s - entry.device.measured_at
        return entry if entry.schema == SCHEMA and 0 <= age_s <= MAX_AGE_S else None

    def store(self, key: str, entry: Entry) -> str:
        """Keep an entry, atomically; return why it could not be kept, or nothing."""
        file = self._file(key)
        partial = file.with_name(f".{key}.{os.getpid()}.partial")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(msgspec.json.encode(entry))
            partial.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            return f"{self._directory}: {error.strerror}"
        return ""

    def _file(self, key: str) -> Path:
        return self._directory / f"profile-{key}.json"


def age_in_words(age_s: float) -> str:
    """Return an age for people: "3 days", "2 hours", "1 minute"."""
    for seconds, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        number = int(age_s // seconds)
        if number:
            return f"{number} {unit}{'s' if number > 1 else ''}"
    return "less than a minute"
