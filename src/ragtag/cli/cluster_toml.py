"""Writes a cluster as TOML, so that `load_cluster` reads the same cluster back."""

import json
from typing import Any

import msgspec

from ragtag.core.cluster import Cluster, Device, Emulation, Link

_THOUSANDTHS = {"sample_s": "sample_ms", "micro_batch_s": "micro_batch_ms", "optimizer_s": "optimizer_ms"}
_THOUSANDTHS |= {"fixed_s": "fixed_ms"}


def to_toml(cluster: Cluster) -> str:
    """Return the text of a cluster file; what has its default value is left out."""
    lines = ["[emulate]"]
    for field, value in _changed(cluster.emulation, Emulation()):
        lines.append(f"{_THOUSANDTHS.get(field, field)} = {_toml(1e3 * value if field in _THOUSANDTHS else value)}")
    for device in cluster.devices:
        lines += ["", "[[device]]", f"name = {_toml(device.name)}"]
        for field, value in _changed(device, Device(name=device.name)):
            lines.append(f"memory = {_toml(f'{value} B')}" if field == "memory_bytes" else f"{field} = {_toml(value)}")
    for link in cluster.links:
        lines += ["", "[[link]]", f"between = {_toml(list(link.between))}"]
        for field, value in _changed(link, Link(between=link.between)):
            bandwidth = field == "bandwidth_bytes_per_s"
            lines.append(f'bandwidth = "{value!r} B/s"' if bandwidth else f'latency = "{value!r} s"')
    return "\n".join(lines) + "\n"


def _changed(value: msgspec.Struct, default: msgspec.Struct) -> list[tuple[str, Any]]:
    tree, usual = msgspec.to_builtins(value), msgspec.to_builtins(default)
    return [(field, item) for field, item in tree.items() if item != usual[field]]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # A JSON text is a TOML basic string, but for characters that a name should not have.
    return json.dumps(value, ensure_ascii=False)
