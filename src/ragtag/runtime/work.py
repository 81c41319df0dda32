"""Which micro-batches this rank computes in one step: those planned for it, and what it pulls from the pool.

One claim is made ahead, while the current micro-batch is in its forward, so that before its backward it is known
whether it is the last one and reduction can overlap with it. A claim is only a hint; the truth is what each sum holds
(`core/ledger.py`).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ragtag.comm.group import Group
from ragtag.comm.work import Work
from ragtag.control.pulling import accepts, claim_size
from ragtag.core.ledger import Ledger, micro_batches
from ragtag.core.values import Plan

Units = tuple[int, ...]


class StepWork:
    """This rank's micro-batches of one step, in the order in which they are computed.

    Args:
        pulled: how many of its last units each rank puts into the pool; empty: none.
        unit_s: seconds a unit takes, by rank, to decide what to claim; needed with a pool.
        by_unit: every micro-batch is exactly one unit.
        serial: how many steps were agreed on before, the same on every rank: whose claims they are. A step's number
            comes again after a `load`, and what was claimed then must not count.
    """

    def __init__(
        self,
        ledger: Ledger,
        group: Group,
        plan: Plan,
        *,
        by_unit: bool,
        pulled: Sequence[int] = (),
        unit_s: Sequence[float] = (),
        serial: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ledger, self._group, self._plan, self._by_unit = ledger, group, plan, by_unit
        self._unit_s, self._serial = unit_s, serial
        self._clock = clock
        self._pool: list[int] = []
        self._planned = [len(ledger.todo(rank)) for rank in range(ledger.world_size)]
        """Units outside the pool, by rank."""
        own = list(ledger.todo(group.rank))
        for rank, count in enumerate(pulled):
            units = ledger.todo(rank)
            count = min(count, len(units))
            self._pool += units[len(units) - count :]
            self._planned[rank] -= count
        in_pool = set(self._pool)
        own = [unit for unit in own if unit not in in_pool]
        # With a pool, the last planned unit goes by itself: the first claim is then decided late, knowing this step's
        # pace.
        split = len(own) - 1 if self._pool and len(own) > 1 else len(own)
        self._queue: deque[Units] = deque([*self._cut(own[:split]), *self._cut(own[split:])])
        self._taken = 0
        """Units of the pool that are known to be claimed by anybody."""
        self._claim: Work | None = None

    def __iter__(self) -> Iterator[Units]:
        started_s = self._clock()
        done = 0
        if not self._queue:
            self._claim_ahead(0, 0.0, done)
            self._receive_claim()
        while self._queue:
            units = self._queue.popleft()
            if not self._queue:
                self._claim_ahead(len(units), self._clock() - started_s, done)
            yield units
            done += len(units)
            self._receive_claim()

    def is_last(self) -> bool:
        """Whether the micro-batch given out last is this rank's last one of the step; ask after its forward."""
        self._receive_claim()
        return not self._queue

    def _claim_ahead(self, current: int, elapsed_s: float, done: int) -> None:
        """Claim what comes after the `current` units, if that does not make everybody wait for this rank."""
        if self._taken >= len(self._pool):
            return
        asked_s = self._clock()

        def decide(claimed: int) -> int:
            return self._how_many(claimed, current, elapsed_s + self._clock() - asked_s, elapsed_s, done)

        self._claim = self._group.claim(self._serial, decide)

    def _how_many(self, claimed: int, current: int, now_s: float, elapsed_s: float, done: int) -> int:
        """How many units to claim, of which `claimed` are gone: none that this rank would finish too late.

        Args:
            claimed: units of the pool that anybody has claimed.
            current: units that this rank has in hand.
            now_s: seconds since the step began.
            elapsed_s: seconds that it took this rank for `done` units.
        """
        remaining = len(self._pool) - claimed
        if remaining <= 0:
            return 0
        rank = self._group.rank
        per_s = [1 / seconds if seconds > 0 else 0.0 for seconds in self._unit_s]
        own_unit_s = elapsed_s / done if done else self._unit_s[rank]
        count = claim_size(remaining, per_s[rank] / sum(per_s))
        while not accepts(
            rank=rank,
            remaining=remaining,
            count=count,
            own_left_s=current * own_unit_s,
            own_unit_s=own_unit_s,
            unit_s=self._unit_s,
            planned_left=[max(0.0, units - now_s * speed) for units, speed in zip(self._planned, per_s)],
        ):
            if count == 1:
                return 0
            count //= 2
        return count

    def _receive_claim(self) -> None:
        if self._claim is None:
            return
        work, self._claim = self._claim, None
        self._group.wait(work, "claiming work")
        first, count = work.result
        self._taken = first + count
        units = self._pool[first : first + count]
        for unit in units:
            self._ledger.claim(unit, self._group.rank)
        self._queue.extend(self._cut(units))

    def _cut(self, units: Sequence[int]) -> list[Units]:
        if self._by_unit:
            return [(unit,) for unit in units]
        return micro_batches(self._ledger, sorted(units), self._plan.micro_batch[self._group.rank])
