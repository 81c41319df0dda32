import math
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ragtag.control import change
from ragtag.control.change import find_change
from ragtag.control.robust import log_ratio, median, midmean, upper_quartile
from ragtag.control.window import window_of


def compare_all(levels, noise, patience, flapping):
    """Every comparison in full, those of the fewest steps first."""
    average = upper_quartile if flapping else midmean
    for newest in (2, 3, 4, 6, 10, 20, 40):
        older = len(levels) - newest
        if older < (3 if newest > 2 else 1):
            return None
        base = average(levels[:older])
        usual = log_ratio(median(levels[-newest:]), base)
        off = [math.copysign(1, usual) * log_ratio(level, base) for level in levels[-newest:]]
        deviations = {2: 3.0, 3: 1.0, 4: 1.0}.get(newest)
        all_off = deviations is None or min(off) > deviations * noise * math.sqrt(1 + 1 / older)
        far_off = newest == 2 or abs(usual) > 5 * noise * math.sqrt(1.57 * (1 / newest + 1 / older))
        if all_off and far_off and (usual > 0 or newest >= patience):
            return newest, usual < 0
    return None


@st.composite
def noisy_windows(draw):
    """Levels with noise that go over to another level, somewhere, or do so to and fro."""
    draws = random.Random(draw(st.integers(0, 10**6)))
    size = draw(st.integers(1, 128))
    sigma = draw(st.sampled_from([0.0, 0.002, 0.01, 0.03, 0.1, 0.4]))
    newest = draw(st.integers(0, size))
    factor = draw(st.floats(0.3, 3) | st.floats(0.97, 1.03))
    every = draw(st.sampled_from([1000, 1000, 5, 13]))
    levels = [
        math.exp(sigma * draws.gauss(0, 1)) * (factor if place >= size - newest or place // every % 2 else 1)
        for place in range(size)
    ]
    return levels, max(0.01, sigma * draw(st.floats(0.3, 1.5)))


@st.composite
def close_calls(draw):
    """Levels hardly on one side of the threshold of a change, or the other."""
    newest = draw(st.sampled_from([2, 3, 4, 6, 10, 20, 40]))
    older = draw(st.integers(3, 128 - newest))
    noise, spread = draw(st.floats(0.01, 0.3)), draw(st.sampled_from([0.0, 0.001, 0.1]))
    variances = 9 * (1 + 1 / older) if newest == 2 else 25 * 1.57 * (1 / newest + 1 / older)
    margin = min(noise * math.sqrt(variances) * draw(st.floats(0.98, 1.1)), 1.9)
    factor = (2 + margin) / (2 - margin)
    draws = random.Random(draw(st.integers(0, 10**6)))
    before = [1 + spread * noise * draws.choice([-1, 0, 0, 1]) for _ in range(older)]
    after = [factor if draw(st.booleans()) else 1 / factor] * newest
    return before + after, noise


few_values = st.lists(st.sampled_from([0.5, 0.9, 1.0, 1.1, 2.0]), min_size=1, max_size=12)
windows = st.one_of(noisy_windows(), close_calls(), st.tuples(few_values, st.floats(0.01, 0.3)))


@settings(max_examples=1000)
@given(windows, st.sampled_from([2, 8, 32]), st.booleans())
@example(([1.0] * 126 + [1.04] * 2, 0.01), 2, False)
@example(([1.0] * 88 + [1.02] * 40, 0.01), 2, False)
@example(([1.0], 0.01), 2, False)
def test_the_quick_answer_is_the_full_one(window, patience, flapping):
    levels, noise = window
    found = find_change(window_of(levels), noise, patience=patience, flapping=flapping)
    assert found == compare_all(levels, noise, patience, flapping)


def test_in_noise_hardly_a_step_is_compared_in_full(monkeypatch):
    compared = []
    compare = change._compare
    monkeypatch.setattr(change, "_compare", lambda *arguments: compared.append(1) or compare(*arguments))
    draws = random.Random(0)
    levels = [math.exp(0.05 * draws.gauss(0, 1)) for _ in range(1000)]
    for step in range(128, 1000):
        find_change(window_of(levels[:step]), 0.05, patience=2, flapping=False)
    assert len(compared) < 0.02 * 872
