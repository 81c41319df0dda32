"""`ragtag export`: a checkpoint's weights, for everything that is not ragtag.

The one idea: the file is what `model.state_dict()` held, under the model's own names and nothing else, so any reader of
safetensors can use it and a strict `load_state_dict` takes it.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from ragtag.checkpoint.directory import Directory, newest_good
from ragtag.checkpoint.file import for_file, write_whole
from ragtag.checkpoint.storage import is_remote, open_storage, split
from ragtag.core.errors import CheckpointError


def run_export(checkpoint: str, weights: Path, *, as_json: bool) -> None:
    """Write the weights in `checkpoint`, a file or a directory of them, to `weights`, and print what was written.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged or of another kind, or `weights` cannot be written.
    """
    source, tree = _read(checkpoint)
    if not (isinstance(tree, dict) and isinstance(tree.get("model"), dict) and "committed" in tree):
        raise CheckpointError(f"{source} holds no training state. Export a file that `Trainer.save` wrote.")
    if not is_remote(source) and os.path.realpath(source) == os.path.realpath(weights):
        raise CheckpointError(f"the weights would replace the checkpoint {source} itself. Name another file.")
    state = tree["model"]
    tensors = _apart({name: for_file(name, value) for name, value in state.items() if isinstance(value, torch.Tensor)})
    write_whole(weights, tensors, {"format": "pt"}, kind="weights file")
    left_out = [name for name in state if name not in tensors]
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if as_json:
        print(
            json.dumps(
                {
                    "checkpoint": source,
                    "weights": str(weights),
                    "step": tree["committed"],
                    "tensors": len(tensors),
                    "bytes": num_bytes,
                    "left_out": left_out,
                }
            )
        )
        return
    print(f"{weights}: {len(tensors)} tensors, {num_bytes} bytes, after step {tree['committed']} ({source})")
    if left_out:
        print(f"left out, because they are no tensors: {', '.join(left_out)}")


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tied ones: safetensors holds no two names for one memory, and a strict load asks for every name."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        apart[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return apart


def _read(checkpoint: str) -> tuple[str, Any]:
    """The address of the file that was read, and what it holds."""
    if checkpoint.rstrip("/").endswith(".safetensors") or (not is_remote(checkpoint) and Path(checkpoint).is_file()):
        storage, name = split(checkpoint)
        return checkpoint, storage.load(name)
    if not is_remote(checkpoint) and not Path(checkpoint.removeprefix("file://")).expanduser().is_dir():
        raise CheckpointError(f"there is no checkpoint file or directory {checkpoint}. Check the path.")
    directory = Directory(open_storage(checkpoint))
    mark, tree = newest_good(directory)
    return directory.where(mark), tree
