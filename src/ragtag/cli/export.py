"""`ragtag export`: a checkpoint's weights, for everything that is not ragtag.

The one idea: the file is what `model.state_dict()` held, under the model's own names and nothing else, so any reader of
safetensors can use it and a strict `load_state_dict` takes it. It is copied part by part: neither a device nor this
machine's memory has to hold the model.
"""

import json
import os
from pathlib import Path

from ragtag.checkpoint.directory import Directory, newest_open
from ragtag.checkpoint.file import SavedFile, checked, write_whole
from ragtag.checkpoint.parts import Described, Part
from ragtag.checkpoint.storage import is_remote, open_storage, split
from ragtag.core.errors import CheckpointError


def run_export(checkpoint: str, weights: Path, *, as_json: bool) -> None:
    """Write the weights in `checkpoint`, a file or a directory of them, to `weights`, and print what was written.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged or of another kind, or `weights` cannot be written.
    """
    source, saved = _open(checkpoint)
    with saved:
        tree = saved.tree
        if not (isinstance(tree, dict) and isinstance(tree.get("model"), dict) and "committed" in tree):
            raise CheckpointError(f"{source} holds no training state. Export a file that `Trainer.save` wrote.")
        if not is_remote(source) and os.path.realpath(source) == os.path.realpath(weights):
            raise CheckpointError(f"the weights would replace the checkpoint {source} itself. Name another file.")
        state = {name: value for name, value in tree["model"].items() if isinstance(value, Described)}
        # One of its own for each name: a strict load asks for every name, and tied ones are one in a checkpoint.
        tensors = {name: Described(each.shape, each.dtype) for name, each in state.items()}
        copies: dict[Described, list[Described]] = {}
        for name, each in state.items():
            copies.setdefault(each, []).append(tensors[name])
        parts = (Part(copy, first, values) for of, first, values in saved.parts() for copy in copies.get(of, ()))
        write_whole(weights, tensors, {"format": "pt"}, parts=parts, kind="weights file")
    left_out = [name for name in tree["model"] if name not in tensors]
    num_bytes = sum(each.numel * each.dtype.itemsize for each in tensors.values())
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


def _open(checkpoint: str) -> tuple[str, SavedFile]:
    """The address of the file that is to be read, and the file, undamaged."""
    if checkpoint.rstrip("/").endswith(".safetensors") or (not is_remote(checkpoint) and Path(checkpoint).is_file()):
        storage, name = split(checkpoint)
        return checkpoint, checked(storage.open(name))
    if not is_remote(checkpoint) and not Path(checkpoint.removeprefix("file://")).expanduser().is_dir():
        raise CheckpointError(f"there is no checkpoint file or directory {checkpoint}. Check the path.")
    directory = Directory(open_storage(checkpoint))
    mark, saved = newest_open(directory)
    return directory.where(mark), saved
