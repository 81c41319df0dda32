"""One checkpoint is one safetensors file, readable by any tool that reads those, and either whole or not there.

The one idea: everything is written to a neighbouring file that takes the final name only once it is safely on disk;
reading checks every tensor and the skeleton against their CRC-32, so a damaged file is an error and never a wrong
number. Both go part by part, so neither needs room for all of it.
"""

import contextlib
import glob
import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ragtag.checkpoint.parts import Described, Part, spans
from ragtag.checkpoint.safetensors_file import (
    HEADER_LIMIT_BYTES,
    Place,
    has_name,
    header_of,
    places_of,
    read_header,
)
from ragtag.checkpoint.tree import flatten_described, unflatten
from ragtag.core.errors import CheckpointError

SCHEMA = 1
_FORMAT = "ragtag"
_LARGEST_CHECKSUM = (1 << 32) - 1
_WAY_OUT = "It is truncated, damaged or no checkpoint; load an older one."

Tensors = Mapping[str, torch.Tensor | Described]


def save_file(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    parts: Iterable[Part] = (),
    called: str = "",
    confirm: Callable[[], None] | None = None,
) -> None:
    """Write `tree` (see `flatten` for what it may hold) to `path`, replacing what is there in one step.

    Tensors come back on the CPU. Errors name the file as `called`, or by its path. `confirm` is called when all is
    written, just before it takes the place of what is there; what it raises is raised, and nothing was replaced.

    Args:
        parts: all of every tensor that is described only, each tensor's in their order.

    Raises:
        CheckpointError: the tree holds something else, or the file system refused; a previous file at `path` is then
            untouched.
    """
    skeleton, tensors = flatten_described(tree)

    def metadata(checksums: Mapping[str, int]) -> dict[str, str]:
        text = json.dumps(dict(checksums))
        return {
            "format": _FORMAT,
            "schema": str(SCHEMA),
            "skeleton": skeleton,
            "checksums": text,
            "header_checksum": str(_text_checksum(str(SCHEMA), skeleton, text)),
        }

    def longest(names: Iterable[str]) -> dict[str, str]:
        return {**metadata(dict.fromkeys(names, _LARGEST_CHECKSUM)), "header_checksum": str(_LARGEST_CHECKSUM)}

    def write(file: BinaryIO) -> None:
        places = places_of(tensors)
        room = len(header_of(places, longest(places)))
        if room > HEADER_LIMIT_BYTES:
            raise CheckpointError(f"the state to save takes {room} bytes besides its tensors; keep numbers in tensors.")
        checksums = _write_tensors(file, room, places, tensors, parts)
        file.seek(0)
        file.write(header_of(places, metadata(checksums), room=room))

    _refuse_unsupported(tensors)
    _write_whole(path, write, kind="checkpoint", called=called, confirm=confirm)


def write_whole(
    path: str | os.PathLike[str],
    tensors: Tensors,
    metadata: Mapping[str, str],
    *,
    parts: Iterable[Part] = (),
    kind: str = "checkpoint",
    called: str = "",
    confirm: Callable[[], None] | None = None,
) -> None:
    """Write `tensors` as one safetensors file, or leave what is there.

    The file is `fsync`ed, then renamed, then the directory is `fsync`ed. A symbolic link is followed. `parts` are as
    for `save_file`.

    Raises:
        CheckpointError: the file system refused, or the format has no such tensors.
    """

    def write(file: BinaryIO) -> None:
        places = places_of(tensors)
        header = header_of(places, metadata)
        file.write(header)
        _write_tensors(file, len(header), places, tensors, parts)

    _refuse_unsupported(tensors)
    _write_whole(path, write, kind=kind, called=called, confirm=confirm)


def _write_whole(
    path: str | os.PathLike[str],
    write: Callable[[BinaryIO], None],
    *,
    kind: str,
    called: str,
    confirm: Callable[[], None] | None,
) -> None:
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        # Of writers that were killed, or are frozen: one that wakes must not replace what is newer by now.
        for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
            left.unlink(missing_ok=True)
        _write_through(beside, write)
        if confirm is not None:
            confirm()
        os.replace(beside, target)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the {kind} {called or target}: {error}. A previous {kind} of that name is untouched. "
            f"Free space or permissions in {target.parent}, or save elsewhere."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
    # Some network file systems cannot flush a directory; the new file is whole all the same.
    with contextlib.suppress(OSError):
        _flush_directory(target.parent)


def _write_through(path: Path, write: Callable[[BinaryIO], None]) -> None:
    with open(path, "xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _write_tensors(
    file: BinaryIO, begin: int, places: Mapping[str, Place], tensors: Tensors, parts: Iterable[Part]
) -> dict[str, int]:
    """Write every tensor to its place behind byte `begin`, and return their checksums."""
    checksums = {name: _checksum_of_kind(place.dtype, place.shape) for name, place in places.items()}
    written = dict.fromkeys(places, 0)

    def put(name: str, first: int, values: torch.Tensor) -> None:
        assert first == written[name], f"the parts of '{name}' follow on each other"
        written[name] += values.numel()
        if values.numel():
            content = _bytes_of(values)
            checksums[name] = zlib.crc32(content, checksums[name])
            file.seek(begin + places[name].start + first * values.dtype.itemsize)
            file.write(content)

    for name in places:
        tensor = tensors[name]
        if isinstance(tensor, torch.Tensor):
            host = tensor.detach().resolve_conj().resolve_neg().cpu()
            put(name, 0, host.contiguous().reshape(-1))
    names = {each: name for name, each in tensors.items() if isinstance(each, Described)}
    for part in parts:
        put(names[part.of], part.first, part.values)
    assert all(written[name] == each.numel for each, name in names.items()), "every tensor has come"
    return checksums


class SavedFile:
    """A checkpoint that is open for reading: its tree at once, its tensors when they are asked for.

    Errors name the file as `called`, or by its path.

    Args:
        at_close: called when it is closed.

    Raises:
        CheckpointError: no such file, not a checkpoint, truncated, its header damaged, or from a newer ragtag.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, called: str = "", at_close: Callable[[], None] = lambda: None
    ) -> None:
        self._called, self._at_close = called or str(path), at_close
        if not Path(path).is_file():
            raise CheckpointError(
                f"there is no checkpoint file {self._called}. Check the path; `Trainer.save(path)` writes one."
            )
        with contextlib.ExitStack() as opened:
            try:
                self._file = opened.enter_context(open(path, "rb"))
                metadata, self._places, self._begin = read_header(self._file, os.fstat(self._file.fileno()).st_size)
            except (OSError, ValueError) as error:
                raise self._unreadable(error) from error
            self.skeleton = _checked_metadata(self._called, metadata)["skeleton"]
            self._checksums: dict[str, int] = json.loads(metadata["checksums"])
            if set(self._checksums) != set(self._places):
                raise CheckpointError(
                    f"the checkpoint {self._called} is damaged: it lacks tensors or has others. {_WAY_OUT}"
                )
            self.described = {name: Described(place.shape, place.dtype) for name, place in self._places.items()}
            """What its tensors are, by name, in their order in the file."""
            self.tree = unflatten(self.skeleton, self.described)
            opened.pop_all()

    def __enter__(self) -> "SavedFile":
        """Close it at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
        self._at_close()

    def parts(self) -> Iterator[Part]:
        """Give all tensors, in their order, part by part: with its last part, a tensor has been checked.

        Raises:
            CheckpointError: one is damaged, or cannot be read.
        """
        for name, (dtype, shape, start, _) in self._places.items():
            checksum, described = _checksum_of_kind(dtype, shape), self.described[name]
            part: Part | None = None
            for first, last in spans(0, described.numel, dtype.itemsize):
                if part is not None:
                    yield part
                part = Part(described, first, self._read(start + first * dtype.itemsize, dtype, last - first))
                checksum = zlib.crc32(_bytes_of(part.values), checksum)
            if checksum != self._checksums[name]:
                raise CheckpointError(
                    f"the checkpoint {self._called} is damaged: tensor '{name}' fails its checksum. {_WAY_OUT}"
                )
            if part is not None:
                yield part

    def load(self) -> Any:
        """Return the tree with all its tensors.

        Raises:
            CheckpointError: one is damaged, or cannot be read.
        """
        tensors = {described: described.empty() for described in self.described.values()}
        for of, first, values in self.parts():
            tensors[of].view(-1)[first : first + values.numel()].copy_(values)
        return unflatten(self.skeleton, {name: tensors[described] for name, described in self.described.items()})

    def check(self) -> None:
        """Return if no tensor is damaged.

        Raises:
            CheckpointError: one is, or cannot be read.
        """
        for _ in self.parts():
            pass

    def _read(self, start: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        values = torch.empty(count, dtype=dtype)
        try:
            self._file.seek(self._begin + start)
            if self._file.readinto(_bytes_of(values)) != values.nbytes:
                raise OSError("it has become shorter")
        except OSError as error:
            raise self._unreadable(error) from error
        return values

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"cannot read the checkpoint {self._called}: {error}. {_WAY_OUT}")


def load_file(path: str | os.PathLike[str], *, called: str = "") -> Any:
    """Return the tree saved in `path`, its tensors on the CPU. Errors name the file as `called`, or by its path.

    Raises:
        CheckpointError: no such file, not a checkpoint, truncated, damaged, or from a newer ragtag.
    """
    with SavedFile(path, called=called) as saved:
        return saved.load()


def checked(saved: SavedFile) -> SavedFile:
    """Return `saved`, undamaged; a damaged one is closed. Raises CheckpointError."""
    try:
        saved.check()
    except BaseException:
        saved.close()
        raise
    return saved


def load_outline(path: str | os.PathLike[str]) -> Any:
    """Return the tree saved in `path` with `Described` in place of every tensor, from the file's header alone.

    Raises:
        CheckpointError: as `load_file`; damage to tensors is not seen.
    """
    with SavedFile(path) as saved:
        return saved.tree


def _checked_metadata(path: str, metadata: Mapping[str, str]) -> Mapping[str, str]:
    if metadata.get("format") != _FORMAT or not metadata.get("schema", "").isdecimal():
        raise CheckpointError(
            f"{path} is a safetensors file but no ragtag checkpoint. Load one that `Trainer.save` wrote."
        )
    if int(metadata["schema"]) > SCHEMA:
        raise CheckpointError(
            f"the checkpoint {path} has schema {metadata['schema']}, this ragtag reads up to {SCHEMA}. Upgrade ragtag."
        )
    texts = (metadata["schema"], metadata.get("skeleton", ""), metadata.get("checksums", ""))
    if metadata.get("header_checksum") != str(_text_checksum(*texts)):
        raise CheckpointError(f"the checkpoint {path} is damaged: its header fails its checksum. {_WAY_OUT}")
    return metadata


def _refuse_unsupported(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if not has_name(tensor.dtype):
            raise CheckpointError(f"the state at '{name}' is a {tensor.dtype} tensor, which safetensors cannot hold.")


def _bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of values that are contiguous and not none."""
    return values.view(torch.uint8).numpy().data


def _checksum_of_kind(dtype: torch.dtype, shape: Iterable[int]) -> int:
    """The beginning of a tensor's checksum, CRC-32 of dtype, shape and contents: the same bytes under another dtype
    are other numbers."""
    return zlib.crc32(f"{dtype} {tuple(shape)}".encode())


def _text_checksum(*texts: str) -> int:
    return zlib.crc32(json.dumps(texts).encode())


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
