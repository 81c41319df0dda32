"""Bytes against samples of a micro-batch, as the line that planning uses.

The one idea: the line goes exactly through the largest measured size, and where one sample more was seen not to fit it
says so too; everywhere else it is within the rounding of one sample.
"""

from collections.abc import Mapping

from ragtag.core.profile import Memory
from ragtag.profile.limit import Limit


def memory_line(peaks: Mapping[int, int], *, limit: Limit, capacity_bytes: int | None, floor_bytes: int) -> Memory:
    """Return fixed and per-sample bytes.

    Args:
        peaks: measured peak bytes by size, for sizes that fit; the largest one among them is `limit.largest`.
        limit: what was found by trying.
        capacity_bytes: what the device has; None: not limited.
        floor_bytes: what is there without any sample: parameters, gradients, optimizer state.
    """
    sizes = sorted(peaks)
    last = sizes[-1]
    if len(sizes) > 1:
        before = sizes[-2]
        per_sample = max(0, -((peaks[before] - peaks[last]) // (last - before)))
    else:
        per_sample = max(0, -((floor_bytes - peaks[last]) // last))
    per_sample = max(per_sample, _least_to_refuse(peaks[last], limit, capacity_bytes))
    fixed = peaks[last] - per_sample * last
    if fixed < 0:
        fixed, per_sample = 0, -(-peaks[last] // last)
    return Memory(fixed_bytes=fixed, per_sample_bytes=per_sample)


def per_sample_from(fixed_bytes: int, peak_bytes: int, *, limit: Limit, capacity_bytes: int | None) -> int:
    """Return the per-sample bytes of another line with the same fixed part, through `peak_bytes` at `limit.largest`."""
    per_sample = max(0, -((fixed_bytes - peak_bytes) // limit.largest))
    if limit.refused is None or capacity_bytes is None:
        return per_sample
    room = capacity_bytes - fixed_bytes
    return max(min(max(per_sample, room // (limit.largest + 1) + 1), room // limit.largest), 0)


def _least_to_refuse(peak_bytes: int, limit: Limit, capacity_bytes: int | None) -> int:
    if limit.refused is None or capacity_bytes is None:
        return 0
    return max(0, capacity_bytes - peak_bytes + 1)
