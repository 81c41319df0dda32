"""How a row of elements is cut into one chunk a rank."""

from collections.abc import Sequence

from ragtag.core.errors import SettingError


def chunk_sizes(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` elements in proportion to integer `weights`, by largest remainder, ties to the lowest rank.

    Sums to `total`; differs from the exact share by less than one; a weight of 0 gives 0 elements.

    Raises:
        SettingError: a weight is negative, or all are 0.
    """
    weight_sum = sum(weights)
    if min(weights, default=0) < 0 or weight_sum == 0:
        raise SettingError(f"chunk weights must be 0 or more and not all 0, got {list(weights)}.")
    sizes = [total * weight // weight_sum for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (-(total * weights[rank] % weight_sum), rank))
    for rank in by_remainder[: total - sum(sizes)]:
        sizes[rank] += 1
    return sizes
