"""Where checkpoints lie: a directory on this machine, or what an fsspec URL names. One small interface for both.

The one idea: a name is written in full before anybody is told of it. On a local disk that is a rename; elsewhere
whoever writes a file says so afterwards, in another one (`directory.py`), and readers check what they read.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ragtag.checkpoint.file import SavedFile, load_file, save_file
from ragtag.checkpoint.parts import Part
from ragtag.core.errors import CheckpointError
from ragtag.core.one_go import write_in_one_go


class Storage(Protocol):
    """A flat set of named files. Everything raises CheckpointError that names the file and what to do."""

    address: str
    """As a person writes it."""

    def prepare(self) -> None:
        """Make it, if need be, and find out whether it can be written to."""
        ...

    def names(self) -> dict[str, str]:
        """What is there, if anything: names, each with what tells two files of that name on two machines apart."""
        ...

    def save(
        self, name: str, tree: Any, confirm: Callable[[], None] | None = None, *, parts: Iterable[Part] = ()
    ) -> None:
        """Write a checkpoint; what `confirm` raises when all is written leaves what is there. `parts` are those of the
        tensors that are described only."""
        ...

    def load(self, name: str) -> Any:
        """Read and check one."""
        ...

    def open(self, name: str) -> SavedFile:
        """Open one, to be read part by part and closed."""
        ...

    def write_text(self, name: str, text: str) -> None:
        """Write a small file."""
        ...

    def read_text(self, name: str) -> str | None:
        """What a small file holds; None: there is none, or it cannot be read."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file that may be gone already."""
        ...


def open_storage(address: str | os.PathLike[str]) -> Storage:
    """Return the storage at a local path, `file://`, or another URL that fsspec knows.

    Raises:
        CheckpointError: fsspec does not know it, or lacks a package for it.
    """
    text = os.fspath(address)
    if is_remote(text):
        return RemoteStorage(text)
    return LocalStorage(Path(text.removeprefix("file://")).expanduser())


def is_remote(address: str | os.PathLike[str]) -> bool:
    """Whether an address is a URL of something else than this machine's files."""
    text = os.fspath(address)
    return "://" in text and not text.startswith("file://")


def split(address: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Return the storage that a file's path or URL lies in, and its name there."""
    text = os.fspath(address).rstrip("/")
    if is_remote(text):
        parent, _, name = text.rpartition("/")
        return open_storage(parent if not parent.endswith(":/") else f"{parent}/"), name
    path = Path(text.removeprefix("file://")).expanduser()
    return LocalStorage(path.parent), path.name


class LocalStorage:
    """A directory on this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.address = str(path)

    def prepare(self) -> None:
        """Make the directory."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot make the directory {self._path} for checkpoints: {error.strerror}."
            ) from error
        if not os.access(self._path, os.W_OK | os.X_OK):
            raise CheckpointError(f"the directory {self._path} for checkpoints may not be written to by this user.")

    def names(self) -> dict[str, str]:
        """Names, each with inode, size and time of its file."""
        try:
            with os.scandir(self._path) as entries:
                return {entry.name: _identity(entry.stat()) for entry in entries if entry.is_file()}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(f"cannot look into {self._path} for checkpoints: {error.strerror}.") from error

    def save(
        self, name: str, tree: Any, confirm: Callable[[], None] | None = None, *, parts: Iterable[Part] = ()
    ) -> None:
        """Write a checkpoint in one step."""
        save_file(self._path / name, tree, parts=parts, confirm=confirm)

    def load(self, name: str) -> Any:
        """Read and check one."""
        return load_file(self._path / name)

    def open(self, name: str) -> SavedFile:
        """Open one."""
        return SavedFile(self._path / name)

    def write_text(self, name: str, text: str) -> None:
        """Write a small file in one step."""
        try:
            write_in_one_go(self._path / name, text.encode())
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path / name}: {error.strerror}.") from error

    def read_text(self, name: str) -> str | None:
        """What a small file holds."""
        try:
            return (self._path / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def remove(self, name: str) -> None:
        """Remove a file."""
        try:
            (self._path / name).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot remove {self._path / name}: {error.strerror}.") from error


class RemoteStorage:
    """What an fsspec URL names; checkpoints go through a file on this machine, so that they are checked alike."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/") if not address.endswith("://") else address
        try:
            from fsspec.core import url_to_fs  # where it is needed only

            self._system, self._root = url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"checkpoints cannot be kept at {address}: {error}. Install what fsspec needs for it (pip install "
                f"s3fs, gcsfs, adlfs, ...), or name a local directory."
            ) from error

    def prepare(self) -> None:
        """Make the directory, where there are such."""
        with self._refusal("make the directory", self.address):
            self._system.makedirs(self._root, exist_ok=True)

    def names(self) -> dict[str, str]:
        """Names; all machines see the same files."""
        with self._refusal("list", self.address):
            self._system.invalidate_cache()  # another machine may have written
            try:
                found = self._system.ls(self._root, detail=True)
            except FileNotFoundError:
                return {}
            return {entry["name"].rstrip("/").rpartition("/")[2]: "" for entry in found if entry["type"] == "file"}

    def save(
        self, name: str, tree: Any, confirm: Callable[[], None] | None = None, *, parts: Iterable[Part] = ()
    ) -> None:
        """Write a checkpoint."""
        called = self._called(name)
        with tempfile.TemporaryDirectory(prefix="ragtag-") as folder:
            local = Path(folder) / "checkpoint"
            save_file(local, tree, parts=parts, called=called, confirm=confirm)
            with self._refusal("write the checkpoint", called):
                self._system.put_file(str(local), self._full(name))

    def load(self, name: str) -> Any:
        """Read and check one."""
        with tempfile.TemporaryDirectory(prefix="ragtag-") as folder:
            return load_file(self._fetched(name, folder), called=self._called(name))

    def open(self, name: str) -> SavedFile:
        """Open one, in a file of this machine that is gone when it is closed."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ragtag-"))
            saved = SavedFile(self._fetched(name, folder), called=self._called(name), at_close=lambda: later.close())
            later = stack.pop_all()
            return saved

    def _fetched(self, name: str, folder: str) -> Path:
        local = Path(folder) / "checkpoint"
        with self._refusal("read the checkpoint", self._called(name)), contextlib.suppress(FileNotFoundError):
            self._system.get_file(self._full(name), str(local))
        return local

    def write_text(self, name: str, text: str) -> None:
        """Write a small file."""
        with self._refusal("write", self._called(name)):
            self._system.pipe_file(self._full(name), text.encode())

    def read_text(self, name: str) -> str | None:
        """What a small file holds."""
        try:
            return self._system.cat_file(self._full(name)).decode()
        except Exception:  # each file system has errors of its own
            return None

    def remove(self, name: str) -> None:
        """Remove a file."""
        with self._refusal("remove", self._called(name)), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._full(name))

    def _full(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _called(self, name: str) -> str:
        return f"{self.address.rstrip('/')}/{name}" if not self.address.endswith("://") else f"{self.address}{name}"

    @contextlib.contextmanager
    def _refusal(self, doing: str, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # each file system has errors of its own
            text = " ".join(str(error).split()) or type(error).__name__
            raise CheckpointError(f"cannot {doing} {what}: {text}. What was there before is untouched.") from error


def _identity(status: os.stat_result) -> str:
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"
