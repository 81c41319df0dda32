import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.errors import SettingError
from ragtag.core.quantities import format_bandwidth, format_bytes, parse_bandwidth, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "24GB", 24_000_000_000),
        (parse_bytes, "512 MiB", 512 * 2**20),
        (parse_bytes, "1.5kB", 1500),
        (parse_bytes, "1e3B", 1000),
        (parse_bandwidth, "100Mbit/s", 12_500_000),
        (parse_bandwidth, "10Gbit/s", 1.25e9),
        (parse_bandwidth, "12.5 MB/s", 12_500_000),
        (parse_seconds, "20ms", 0.02),
        (parse_seconds, "1.5 s", 1.5),
        (parse_seconds, "150us", 150e-6),
        (parse_seconds, "0ms", 0),
    ],
)
def test_quantity_is_read(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (parse_bytes, "24", "no unit"),
        (parse_bytes, "GB", "number and a unit"),
        (parse_bytes, "-1GB", "number and a unit"),
        (parse_bytes, "24gb", "Did you mean 'GB'"),
        (parse_bytes, "24GB/s", "not a unit of a size"),
        (parse_bytes, "1e999B", "too large"),
        (parse_bandwidth, "100Mb/s", "Write 'Mbit/s'"),
        (parse_bandwidth, "100Mbps", "Write 'Mbit/s'"),
        (parse_bandwidth, "100MBit/s", "Did you mean 'Mbit/s'"),
        (parse_bandwidth, "100MB", "not a unit of a bandwidth"),
        (parse_seconds, "20m", "not a unit of a time"),
        (parse_seconds, "", "number and a unit"),
    ],
)
def test_what_is_no_quantity_is_refused_with_what_to_write(parse, text, says):
    with pytest.raises(SettingError, match=says):
        parse(text)


@given(st.floats(1, 1e14))
def test_written_quantities_read_back_to_three_digits(amount):
    assert parse_bytes(format_bytes(amount)) == pytest.approx(amount, rel=6e-3, abs=1)
    assert parse_bandwidth(format_bandwidth(amount)) == pytest.approx(amount, rel=6e-3)


@given(st.integers(0, 10**15), st.sampled_from(["B", "kB", "MB", "GB", "KiB", "GiB"]))
def test_whole_numbers_of_bytes_are_exact_below_2_to_53(number, unit):
    factor = parse_bytes(f"1{unit}")
    parsed = parse_bytes(f"{number}{unit}")
    assert parsed == number * factor if number * factor < 2**53 else math.isclose(parsed, number * factor)
