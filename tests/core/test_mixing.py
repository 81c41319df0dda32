import subprocess
import sys
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.mixing import MASK64, mix64, sample_hash, seed_for


def test_mix64_is_the_splitmix64_output_function():
    # The first outputs of SplitMix64 seeded with 1234567 (state advances by the golden gamma), as published with it.
    gamma = 0x9E3779B97F4A7C15
    outputs = [mix64(1234567 + (i + 1) * gamma) for i in range(5)]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_values_are_pinned():
    assert [seed_for(), seed_for(0), seed_for(0, 0), seed_for(1, 2, 3), seed_for(-1)] == [
        8147104208329303767,
        2547805098422156800,
        2265272444276357577,
        4147287542838828263,
        1971300718473379373,
    ]
    assert [sample_hash(), sample_hash(0), sample_hash(7, 11), sample_hash(1 << 40)] == [
        3793791033,
        1186414201,
        2844862211,
        3129417298,
    ]


def test_another_process_with_another_hash_seed_agrees():
    code = "from ragtag.core.mixing import seed_for, sample_hash; print(seed_for(1, 2, 3), sample_hash(7, 11))"
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "5", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.split() == [str(seed_for(1, 2, 3)), str(sample_hash(7, 11))]


@given(st.lists(st.integers()))
def test_ranges(parts):
    assert 0 <= seed_for(*parts) < 2**63
    assert 0 <= sample_hash(*parts) < 2**32


@given(st.integers(0, MASK64), st.integers(0, MASK64))
def test_mix64_is_injective(a, b):
    assert (mix64(a) == mix64(b)) == (a == b)


def test_order_number_and_value_of_parts_all_count():
    cases = [parts for length in range(4) for parts in product(range(6), repeat=length)]
    assert len({seed_for(*parts) for parts in cases}) == len(cases)


def test_small_keys_do_not_collide():
    cases = [(seed, step, unit) for seed in range(5) for step in range(40) for unit in range(100)]
    assert len({seed_for(*parts) for parts in cases}) == len(cases)
    # 20,000 hashes of 32 bits: 0.05 collisions expected, 3 or more have a probability of 2e-5.
    assert len({sample_hash(*parts) for parts in cases}) > len(cases) - 3


def test_flipping_any_input_bit_flips_about_half_of_the_output_bits():
    for bit in range(64):
        flips = [bin(sample_hash(7, base) ^ sample_hash(7, base ^ (1 << bit))).count("1") for base in range(100)]
        # Mean of 100 binomial(32, 1/2) counts: standard deviation 0.28.
        assert abs(sum(flips) / len(flips) - 16) < 1.7
