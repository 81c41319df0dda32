"""How many bytes a rank sends in a step where state is cut: the ring's traffic, from its schedule.

The one idea: round a ring of n ranks, a rank passes on everything but one chunk. A reduce-scatter ends at its own,
which it keeps; an all-gather ends with the one of the rank after it, which came from there. So it sends N - s_r or
N - s_(r+1) bytes of N, whatever the chunks' sizes (`comm/ring.py`). Votes and other short messages are not in it.
"""

from collections.abc import Sequence

from ragtag.comm.ring import Wire
from ragtag.runtime.zero.flats import Flat
from ragtag.runtime.zero.sharding import Sharding


def reduce_scatter_elements(sizes: Sequence[int], rank: int) -> int:
    """Return the elements that `rank` sends."""
    return sum(sizes) - sizes[rank]


def all_gather_elements(sizes: Sequence[int], rank: int) -> int:
    """Return the elements that `rank` sends."""
    return sum(sizes) - sizes[(rank + 1) % len(sizes)]


def sent_bytes(sharding: Sharding, rank: int, num_rounds: int = 1, *, wire: Wire = "fp32") -> int:
    """Return the bytes that `rank` sends in a step of `num_rounds` micro-batches a rank.

    A step that is done again, for want of memory for instance, sends all of it again.
    """
    rounds = sharding.rounds
    gathers = {} if rounds is None else rounds.gathers()
    total = 0
    for number, block in enumerate(sharding.blocks):
        for flat in block.flats:
            gathered = all_gather_elements(flat.sizes, rank) * _gathered_itemsize(flat)
            if sharding.gathers:
                total += num_rounds * gathers.get(number, 0) * gathered
            elif flat.trained:  # what the optimizer has made of it, once a step
                total += gathered
            if flat.trained:
                reduced = reduce_scatter_elements(flat.sizes, rank) * _summed_itemsize(flat, wire)
                total += reduced * (num_rounds if rounds is not None else 1)
    return total


def _gathered_itemsize(flat: Flat) -> int:
    """The ring carries fp16 and bf16 as fp32."""
    return max(4, flat.dtype.itemsize)


def _summed_itemsize(flat: Flat, wire: Wire) -> int:
    return 2 if wire == "bf16" and flat.dtype.itemsize <= 4 else max(4, flat.dtype.itemsize)
