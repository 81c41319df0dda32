"""Reads a cluster file (TOML): `[[device]]`, `[[link]]` and `[emulate]` tables.

The one idea: it is read strictly. A misspelt key or an impossible value is one error that names file, line, key and
fix, never a default that nobody asked for.
"""

import math
import os
import tomllib
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from ragtag.core.cluster import Cluster, Device, DriftPoint, Emulation, Flip, Link, Stall
from ragtag.core.errors import SettingError, did_you_mean
from ragtag.core.quantities import parse_bandwidth, parse_bytes, parse_seconds


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster file (TOML).

    Raises:
        SettingError: it cannot be read or says something impossible; names file, line, key and fix.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SettingError(
            f"The cluster file {path} cannot be read: {error.strerror}. Give an existing file."
        ) from error
    except UnicodeDecodeError as error:
        raise SettingError(
            f"The cluster file {path} is not text in UTF-8: {error.reason}. Save it as UTF-8."
        ) from error
    return parse_cluster(text, source=str(path))


def parse_cluster(text: str, *, source: str = "the cluster text") -> Cluster:
    """Read a cluster from TOML: `[[device]]`, `[[link]]` and `[emulate]` tables; `source` names it in errors.

    Raises:
        SettingError: names source, line, key and fix.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{source} is not valid TOML: {error}.") from error
    place = _Place(source, text)
    for name in document:
        if name not in ("device", "link", "emulate"):
            close = did_you_mean(name, ["device", "link", "emulate"])
            raise SettingError(
                f"{place('', 0, name)}no such table or key.{close} Tables are [[device]], [[link]], [emulate]."
            )
    tables = _tables(document, "device", place)
    devices = [Device(**_read(table, _DEVICE, place, "[[device]]", index)) for index, table in enumerate(tables)]
    if not devices:
        raise SettingError(f'{source} has no device. Add one: [[device]] and below it name = "box".')
    tables = _tables(document, "link", place)
    links = [Link(**_read(table, _LINK, place, "[[link]]", index)) for index, table in enumerate(tables)]
    emulate = document.get("emulate", {})
    if not isinstance(emulate, dict):
        raise SettingError(f"{place('', 0, 'emulate')}write it as a table: [emulate], then name = value.")
    cluster = Cluster(
        devices=tuple(devices),
        links=tuple(links),
        emulation=Emulation(**_read(emulate, _EMULATE, place, "[emulate]", 0)),
    )
    _check_names(cluster, place)
    _check_links(cluster, place)
    return cluster


class _Place:
    """Where in the file a key stands, as the beginning of an error; the line is looked up only then."""

    def __init__(self, source: str, text: str) -> None:
        self._source = source
        self._lines = text.splitlines()

    def __call__(self, header: str, index: int, key: str) -> str:
        line = self._line(header, index, key)
        where = f"{self._source}, line {line}" if line else self._source
        table = f", {header}" if header else ""
        return f"{where}{table}: {key}: " if key else f"{where}{table}: "

    def _line(self, header: str, index: int, key: str) -> int | None:
        current, seen, found = "", -1, None
        for number, line in enumerate(self._lines, start=1):
            stripped = line.split("#")[0].strip()
            if stripped.startswith("["):
                current = stripped.replace(" ", "")
                seen += current == header
                if (current == header and seen == index) or (not header and current.strip("[]") == key):
                    found = number
            elif (
                key
                and current == header
                and (not header or seen == index)
                and stripped.split("=")[0].strip(" \"'") == key
            ):
                return number
        return found


_Reader = Callable[[Any], Any]
_Fields = Mapping[str, tuple[str, _Reader]]


def _tables(document: Mapping[str, Any], name: str, place: _Place) -> list[dict[str, Any]]:
    tables = document.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SettingError(f"{place('', 0, name)}expected a list of tables. Write [[{name}]], with two brackets.")
    return tables


def _read(table: Mapping[str, Any], fields: _Fields, place: _Place, header: str, index: int) -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        try:
            field, reader = _lookup(key, fields)
            values[field] = reader(value)
        except SettingError as error:
            raise SettingError(f"{place(header, index, key)}{error}") from None
    missing = [key for key in fields if key in _REQUIRED and key not in table and header != "[emulate]"]
    if missing:
        raise SettingError(f"{place(header, index, '')}'{missing[0]}' is missing. Add {_REQUIRED[missing[0]]}.")
    return values


def _lookup(key: str, fields: _Fields) -> tuple[str, _Reader]:
    if key not in fields:
        close = did_you_mean(key, fields)
        raise SettingError(f"no such key.{close or ' Keys are ' + ', '.join(fields) + '.'}")
    return fields[key]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SettingError(f'{value!r} is not valid. Expected a text that is not empty, like "box".')
    return value


def _number(*, above: float | None = None, factor: float = 1.0) -> _Reader:
    """Numbers of at least 0, or above `above`; divided by `factor`."""

    def read(value: Any) -> float:
        plain = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not plain or value < 0 or (above is not None and value <= above):
            expected = "a number of at least 0" if above is None else f"a number above {above:g}"
            raise SettingError(f"{value!r} is not valid. Expected {expected}.")
        return value / factor

    return read


def _whole(least: int) -> _Reader:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SettingError(f"{value!r} is not valid. Expected a whole number of at least {least}.")
        return value

    return read


def _choice(*words: str) -> _Reader:
    def read(value: Any) -> str:
        if value not in words:
            close = did_you_mean(value, words) if isinstance(value, str) else ""
            raise SettingError(f"{value!r} is not valid.{close} Expected {' or '.join(map(repr, words))}.")
        return value

    return read


def _quantity(parse: Callable[[str], float], example: str, *, zero: bool = False) -> _Reader:
    def read(value: Any) -> float:
        if not isinstance(value, str):
            raise SettingError(f'{value!r} is not valid. Expected a number with its unit, in quotes: "{example}".')
        amount = parse(value)
        if amount == 0 and not zero:
            raise SettingError(f"'{value}' is not valid. Expected more than nothing, like \"{example}\".")
        return amount

    return read


def _pair(value: Any) -> tuple[str, str]:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(host, str) for host in value):
        raise SettingError(f'{value!r} is not valid. Expected two hosts: ["first", "second"].')
    if value[0] == value[1]:
        raise SettingError(f"{value!r} is not valid. A link lies between two different hosts.")
    return value[0], value[1]


def _record(cls: Callable[..., Any], fields: _Fields, required: tuple[str, ...]) -> _Reader:
    example = "{" + ", ".join(f"{key} = ..." for key in fields) + "}"

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise SettingError(f"{value!r} is not valid. Expected {example}.")
        values = {}
        for key, item in value.items():
            try:
                field, reader = _lookup(key, fields)
                values[field] = reader(item)
            except SettingError as error:
                raise SettingError(f"{key}: {error}") from None
        missing = [key for key in required if key not in value]
        if missing:
            raise SettingError(f"'{missing[0]}' is missing. Expected {example}.")
        return cls(**values)

    return read


def _records(read_one: _Reader) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise SettingError(f"{value!r} is not valid. Expected a list, in square brackets.")
        return tuple(read_one(item) for item in value)

    return read


def _drift(value: Any) -> tuple[DriftPoint, ...]:
    fields = {"step": ("step", _whole(1)), "speed": ("speed", _number(above=0))}
    points = _records(_record(DriftPoint, fields, ("step", "speed")))(value)
    for point, following in pairwise(points):
        if following.step <= point.step:
            raise SettingError(f"step {following.step} comes after step {point.step}. Put the points in growing order.")
    return points


_REQUIRED = {"name": 'name = "box"', "between": 'between = ["first", "second"]'}
_DEVICE: _Fields = {
    "name": ("name", _text),
    "host": ("host", _text),
    "kind": ("kind", _text),
    "speed": ("speed", _number(above=0)),
    "memory": ("memory_bytes", _quantity(parse_bytes, "24GB")),
    "cpu_percent": ("cpu_percent", _number(above=0)),
    "price_per_hour": ("price_per_hour", _number()),
    "count": ("count", _whole(1)),
    "drift": ("drift", _drift),
    "drift_kind": ("drift_kind", _choice("slide", "step")),
    "flip": (
        "flip",
        _record(
            Flip, {"period": ("period", _whole(1)), "speed": ("speed", _number(above=0))}, required=("period", "speed")
        ),
    ),
    "stall": (
        "stall",
        _records(
            _record(
                Stall,
                {
                    "step": ("step", _whole(1)),
                    "micro_batch": ("micro_batch", _whole(0)),
                    "seconds": ("seconds", _number()),
                },
                required=("step", "seconds"),
            )
        ),
    ),
}
_LINK: _Fields = {
    "between": ("between", _pair),
    "bandwidth": ("bandwidth_bytes_per_s", _quantity(parse_bandwidth, "100Mbit/s")),
    "latency": ("latency_s", _quantity(parse_seconds, "20ms", zero=True)),
}
_EMULATE: _Fields = {
    "sample_ms": ("sample_s", _number(above=0, factor=1e3)),
    "micro_batch_ms": ("micro_batch_s", _number(factor=1e3)),
    "optimizer_ms": ("optimizer_s", _number(factor=1e3)),
    "fixed_ms": ("fixed_s", _number(factor=1e3)),
    "jitter": ("jitter", _number()),
    "jitter_per": ("jitter_per", _choice("step", "micro_batch")),
    "seed": ("seed", _whole(0)),
}


def _check_names(cluster: Cluster, place: _Place) -> None:
    owner: dict[str, int] = {}
    for index, device in enumerate(cluster.devices):
        for single in Cluster(devices=(device,)).expanded():
            if single.name in owner:
                raise SettingError(
                    f"{place('[[device]]', index, 'name')}'{single.name}' is also a name of device "
                    f"{owner[single.name] + 1}. Give each device its own name, or one device a count."
                )
            owner[single.name] = index


def _check_links(cluster: Cluster, place: _Place) -> None:
    hosts = sorted({device.host for device in cluster.devices})
    seen: set[frozenset[str]] = set()
    for index, link in enumerate(cluster.links):
        start = place("[[link]]", index, "between")
        for host in link.between:
            if host not in hosts:
                close = did_you_mean(host, hosts)
                raise SettingError(
                    f"{start}no device is on host '{host}'.{close} Hosts are {', '.join(hosts)}; "
                    f'a device says its own: host = "{host}".'
                )
        if frozenset(link.between) in seen:
            raise SettingError(f"{start}there is a link between '{link.between[0]}' and '{link.between[1]}' already.")
        seen.add(frozenset(link.between))
