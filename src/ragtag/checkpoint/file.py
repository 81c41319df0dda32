"""One checkpoint is one safetensors file, readable by any tool that reads those, and either whole or not there.

The one idea: everything is written to a neighbouring file that takes the final name only once it is safely on disk;
reading checks every tensor and the skeleton against their CRC-32, so a damaged file is an error and never a wrong
number.
"""

import contextlib
import glob
import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file as write_safetensors

from ragtag.checkpoint.tree import flatten, unflatten
from ragtag.core.errors import CheckpointError

SCHEMA = 1
_FORMAT = "ragtag"
_UNSUPPORTED = (torch.complex128, torch.complex32)


def save_file(
    path: str | os.PathLike[str], tree: Any, *, called: str = "", confirm: Callable[[], None] | None = None
) -> None:
    """Write `tree` (see `flatten` for what it may hold) to `path`, replacing what is there in one step.

    Tensors come back on the CPU. Errors name the file as `called`, or by its path. `confirm` is called when all is
    written, just before it takes the place of what is there; what it raises is raised, and nothing was replaced.

    Raises:
        CheckpointError: the tree holds something else, or the file system refused; a previous file at `path` is then
            untouched.
    """
    skeleton, tensors = flatten(tree)
    on_host = {name: for_file(name, tensor) for name, tensor in tensors.items()}
    checksums = json.dumps({name: _checksum(tensor) for name, tensor in on_host.items()})
    metadata = {
        "format": _FORMAT,
        "schema": str(SCHEMA),
        "skeleton": skeleton,
        "checksums": checksums,
        "header_checksum": str(_text_checksum(str(SCHEMA), skeleton, checksums)),
    }
    write_whole(path, on_host, metadata, called=called, confirm=confirm)


def write_whole(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    *,
    kind: str = "checkpoint",
    called: str = "",
    confirm: Callable[[], None] | None = None,
) -> None:
    """Write contiguous tensors of the CPU, none of which share memory, as one safetensors file, or leave what is there.

    The file is `fsync`ed, then renamed, then the directory is `fsync`ed. A symbolic link is followed.

    Raises:
        CheckpointError: the file system refused.
    """
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        # Of writers that were killed, or are frozen: one that wakes must not replace what is newer by now.
        for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
            left.unlink(missing_ok=True)
        # Made here first: the operating system's reason is clearer, and safetensors makes files that only we may read.
        beside.touch(exist_ok=False)
        permissions = beside.stat().st_mode
        write_safetensors(dict(tensors), beside, dict(metadata))
        beside.chmod(permissions)
        _flush(beside)
        if confirm is not None:
            confirm()
        os.replace(beside, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the {kind} {called or target}: {error}. A previous {kind} of that name is untouched. "
            f"Free space or permissions in {target.parent}, or save elsewhere."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
    # Some network file systems cannot flush a directory; the new file is whole all the same.
    with contextlib.suppress(OSError):
        _flush(target.parent)


def load_file(path: str | os.PathLike[str], *, called: str = "") -> Any:
    """Return the tree saved in `path`, its tensors on the CPU. Errors name the file as `called`, or by its path.

    Raises:
        CheckpointError: no such file, not a checkpoint, truncated, damaged, or from a newer ragtag.
    """
    called = called or str(path)
    with _opened(path, called) as (file, metadata):
        expected = json.loads(metadata["checksums"])
        if set(expected) != set(file.keys()):
            raise CheckpointError(f"the checkpoint {called} is damaged: it lacks tensors or has others. {_WAY_OUT}")
        tensors = {name: _checked_tensor(called, name, file.get_tensor(name), expected[name]) for name in expected}
    return unflatten(metadata["skeleton"], tensors)


def load_outline(path: str | os.PathLike[str]) -> Any:
    """Return the tree saved in `path` with None in place of every tensor, from the file's header alone.

    Raises:
        CheckpointError: as `load_file`; damage to tensors is not seen.
    """
    with _opened(path, str(path)) as (file, metadata):
        nothing: Any = dict.fromkeys(file.keys())
        return unflatten(metadata["skeleton"], nothing)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str], called: str) -> Iterator[tuple[Any, Mapping[str, str]]]:
    if not Path(path).is_file():
        raise CheckpointError(f"there is no checkpoint file {called}. Check the path; `Trainer.save(path)` writes one.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file, _checked_metadata(called, file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the checkpoint {called}: {error}. {_WAY_OUT}") from error


_WAY_OUT = "It is truncated, damaged or no checkpoint; load an older one."


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


def _checked_tensor(path: str, name: str, tensor: torch.Tensor, expected: int) -> torch.Tensor:
    # A copy first: what safetensors returns may be the mapped file, which somebody may overwrite in place later.
    tensor = tensor.clone()
    if _checksum(tensor) != expected:
        raise CheckpointError(f"the checkpoint {path} is damaged: tensor '{name}' fails its checksum. {_WAY_OUT}")
    return tensor


def for_file(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as `write_whole` takes it. Raises CheckpointError for dtypes that safetensors lacks."""
    if tensor.dtype in _UNSUPPORTED:
        raise CheckpointError(f"the state at '{name}' is a {tensor.dtype} tensor, which safetensors cannot hold.")
    host = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    # safetensors refuses views into one storage; a copy of each is what a file holds anyway.
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


def _checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of dtype, shape and contents: the same bytes under another dtype are other numbers."""
    described = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.numel() == 0:
        return described
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, described)


def _text_checksum(*texts: str) -> int:
    return zlib.crc32(json.dumps(texts).encode())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
