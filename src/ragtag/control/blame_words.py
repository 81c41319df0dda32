"""Findings in one line that a person understands, with the numbers that led to them."""

from collections.abc import Iterable, Sequence

from ragtag.control.blame_excess import of_others
from ragtag.control.blame_measure import Rank, Step
from ragtag.control.blame_seen import Seen
from ragtag.control.explain import samples


def duration(seconds: float) -> str:
    """Return "41 ms", "0.3 ms" or "2.5 s"."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 1e-3 else f"{1e3 * seconds:.1f} ms"


def compute(seen: Seen, step: Step, rank: int) -> str:
    """Say how long its device takes, and how long it should."""
    took_s = seen.compute_s[rank]
    expected_s = took_s - step.compute_s[rank]
    return f"its device takes {duration(took_s)} for {samples(seen.samples[rank])} instead of {duration(expected_s)}"


def data(seen: Seen, rank: int) -> str:
    """Say how long its loader takes, and those of others."""
    return f"its loader takes {duration(seen.data_s[rank])} ({_others(seen.data_s, rank)})"


def host(seen: Seen, step: Step, rank: int, links: Sequence[int]) -> str:
    """Say for how long it waits for its processors."""
    if links and step.link_host_s[rank] > step.host_s[rank]:
        waits_s = step.link_host_s[rank]
        return f"other work on its processors keeps what receives from the others waiting for {duration(waits_s)}"
    return (
        f"other work on its processors keeps it waiting for {duration(seen.host_s[rank])} of "
        f"{duration(step.work_s[rank])} ({_others(seen.host_s, rank)})"
    )


def memory(seen: Seen, steps: Iterable[Step], of: Rank, rank: int) -> str:
    """Say what too little memory makes it do."""
    parts = []
    lost_s = sum([step.redo_s[rank] for step in steps])
    if of.ran_out_at is not None:
        parts.append(f"its memory ran out in step {of.ran_out_at}")
        if lost_s > 0:
            parts.append(f"{duration(lost_s)} of work were done again")
        if seen.micro_batch[rank] < seen.samples[rank]:
            parts.append(f"it computes {samples(seen.micro_batch[rank])} at a time")
    elif of.in_pieces:
        others = f"others up to {max(seen.micro_batch)}"
        parts.append(f"its memory holds {samples(seen.micro_batch[rank])} at a time ({others})")
    else:
        parts.append(f"its memory is too small: {of.faults:.0f} pages a step are read from disk")
    return ", ".join(parts)


def link(seen: Seen, links: Sequence[int], name: str) -> str:
    """Say for how long messages are under way."""
    under_way_s = max([seen.link_s[each] for each in links])
    rest = [seen.link_s[each] for each in range(len(seen.link_s)) if each not in links]
    others = f" (on other links {duration(sorted(rest)[len(rest) // 2])})" if rest else ""
    return f"{name} keep{'s' if name.startswith('the') else ''} messages under way for {duration(under_way_s)}{others}"


def _others(values: Sequence[float], rank: int) -> str:
    usual = of_others(values)[rank]
    return f"others {duration(usual or 0.0)}"
