"""How a view writes numbers for people; the page does the same in its own language."""

from itertools import pairwise


def digits(value: float | None, count: int = 3) -> str:
    """Return `value` to `count` digits, whole where it is large; a dash where it is not known."""
    if value is None:
        return "–"
    if abs(value) >= 10 ** (count - 1):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.0f}"
    return f"{value:.{count}g}"


def percent(part: float | None) -> str:
    """Return "87 %", or "7.8 %" below ten."""
    if part is None:
        return "–"
    return f"{100 * part:.{1 if part and abs(part) < 0.1 else 0}f} %"


def duration(seconds: float | None) -> str:
    """Return "85 ms", "20.7 s", "12 min", "3 h 20 min" or "2 d 4 h"."""
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{digits(1000 * seconds, 2 if seconds < 0.0995 else 3)} ms"
    if seconds < 90:
        return f"{digits(seconds, 2 if seconds < 10 else 3)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def sparkline(values: list[float], width: int, *, levels: str = "▁▂▃▄▅▆▇█") -> str:
    """Return `values` as at most `width` characters, each the mean of some of them; empty where there are none."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * place // width for place in range(width + 1)]
    means = [sum(values[first:last]) / (last - first) for first, last in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(levels[int((mean - low) / ((high - low) or 1) * (len(levels) - 1) + 0.5)] for mean in means)
