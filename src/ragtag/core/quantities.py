"""Reads quantities with units, as people write them in a cluster file: "24GB", "100Mbit/s", "20ms".

The one idea: a number without a unit, or with one that could mean two things, is refused with what to write instead.
Decimal prefixes are powers of 1000 (GB), binary ones powers of 1024 (GiB).
"""

import math
import re
from collections.abc import Mapping

from ragtag.core.errors import SettingError, did_you_mean

_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9].*?)?\s*")

_SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BITS = {"bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}
_BANDWIDTHS = {f"{unit}/s": float(factor) for unit, factor in _SIZES.items()} | _BITS
_TIMES = {"us": 1e6, "ms": 1e3, "s": 1.0}
"""Divisors, so that "20ms" is the float 0.02."""


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` ("24GB", "512 MiB") says, rounded to whole ones.

    Raises:
        SettingError: no number, no unit, or a unit that is not one.
    """
    number, unit = _split(text, _SIZES, "a size", "24GB")
    return round(number * _SIZES[unit])


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second that `text` ("100Mbit/s", "12.5 MB/s") says.

    Raises:
        SettingError: no number, no unit, or a unit that is not one.
    """
    number, unit = _split(text, _BANDWIDTHS, "a bandwidth", "100Mbit/s")
    return number * _BANDWIDTHS[unit]


def parse_seconds(text: str) -> float:
    """Return the seconds that `text` ("20ms", "1.5 s") says.

    Raises:
        SettingError: no number, no unit, or a unit that is not one.
    """
    number, unit = _split(text, _TIMES, "a time", "20ms")
    return number / _TIMES[unit]


def format_bytes(num_bytes: float) -> str:
    """Return `num_bytes` as people write it, to three digits: "24 GB", "1.5 MB"."""
    for unit in ("TB", "GB", "MB", "kB"):
        if num_bytes >= _SIZES[unit]:
            return f"{num_bytes / _SIZES[unit]:.3g} {unit}"
    return f"{num_bytes:g} B"


def format_bandwidth(bytes_per_s: float) -> str:
    """Return `bytes_per_s` in bits, as links are sold, to three digits: "100 Mbit/s"."""
    for unit in ("Gbit/s", "Mbit/s", "kbit/s"):
        if bytes_per_s >= _BITS[unit]:
            return f"{bytes_per_s / _BITS[unit]:.3g} {unit}"
    return f"{8 * bytes_per_s:g} bit/s"


def _split(text: str, units: Mapping[str, float], what: str, example: str) -> tuple[float, str]:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise SettingError(f"'{text}' is not {what}. Write a number and a unit: \"{example}\".")
    number, unit = float(match[1]), match[2]
    if unit is None:
        raise SettingError(f"'{text}' is not {what}: it has no unit. Write a number and a unit: \"{example}\".")
    if unit not in units:
        raise SettingError(f"'{unit}' is not a unit of {what}.{_closest(unit, units)} Units are {', '.join(units)}.")
    if not math.isfinite(number):
        raise SettingError(f"'{text}' is not {what}: the number is too large.")
    return number, unit


def _closest(unit: str, units: Mapping[str, float]) -> str:
    if unit.endswith(("b/s", "bps")) and "bit/s" in units:
        prefix = unit.removesuffix("b/s").removesuffix("bps")
        bits = next((known for known in _BITS if known.lower() == f"{prefix}bit/s".lower()), None)
        if bits is not None:
            return f" Bits or bytes? Write '{bits}' for bits."
    same = [known for known in units if known.lower() == unit.lower()]
    return f" Did you mean '{same[0]}'?" if same else did_you_mean(unit, units)
