"""Files that a reader never sees half of."""

from pathlib import Path


def write_in_one_go(path: Path, content: bytes) -> None:
    """Write beside `path` and move it there."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)
