"""A thread that settles steps in the name of a training thread that does not come back from its data or its forward.

The one idea: up to the moment when a micro-batch's backward begins, what the rank has summed is whole and can be
given in as it is. The stand-in gives it in, the other ranks do the rest, and the steps that follow go on without this
rank until its training thread is back; it then applies, one after another, what was settled meanwhile. It throws away
the one micro-batch that it had in hand: parameters stay equal on all ranks, and every sample counts once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Protocol

from ragtag.control.absence import REMEMBERED, Passed, late_s, stalled, usual_s
from ragtag.runtime.device import make_current
from ragtag.runtime.run import Run
from ragtag.runtime.settling import NoSums, Settling

_USUAL_OF = 16
"""Steps whose median is the usual time of a step."""
_LEAST_STEPS = 4
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.02, 1.0
"""Between two looks at the clock: a stall is worth no less."""
_UNKNOWN_NAP_S = 0.1
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.002, 0.02
"""Between two looks whether the others have begun a step."""
_MOST_BYTES = 1 << 30
"""Of sums that wait to be applied; one is kept in any case."""


class StoodIn(Exception):
    """Raised in the training thread when it comes back: its step was settled without it."""


class Cover(Protocol):
    """What the training thread tells about where it is."""

    def settled(self, number: int) -> Settling | None:
        """Return step `number` if a stand-in has settled it, waiting while one is about to."""
        ...

    @contextmanager
    def covering(self, settling: Settling) -> Iterator[None]:
        """The rank's own work of a step."""
        yield

    def begin_micro_batch(self, num_samples: int) -> None:
        """From here on a stand-in may take over."""
        ...

    def begin_forward(self) -> None:
        """The data is there. Raises StoodIn if a stand-in has taken over."""
        ...

    def begin_backward(self) -> None:
        """From here on none may. Raises StoodIn if one has."""
        ...

    def set_aside(self) -> None:
        """The micro-batch in hand has failed: from here on none may, until the next one begins. Raises StoodIn if one
        has."""
        ...

    def begin_step(self, number: int) -> None:
        """Tell those who wait for it that this step has begun."""
        ...

    def finished(self, settling: Settling, wall_s: float) -> None:
        """A step was applied, so many seconds after the training thread turned to it."""
        ...

    def withdraw(self) -> None:
        """Return when nobody acts for the training thread: its step has failed, and the group was told."""
        ...

    def close(self) -> None:
        """End the thread."""
        ...


class NoCover:
    """Nobody stands in."""

    def settled(self, number: int) -> None:
        """Return None."""

    @contextmanager
    def covering(self, settling: Settling) -> Iterator[None]:
        """Do nothing."""
        yield

    def begin_micro_batch(self, num_samples: int) -> None:
        """Do nothing."""

    def begin_forward(self) -> None:
        """Do nothing."""

    def begin_backward(self) -> None:
        """Do nothing."""

    def set_aside(self) -> None:
        """Do nothing."""

    def begin_step(self, number: int) -> None:
        """Do nothing."""

    def finished(self, settling: Settling, wall_s: float) -> None:
        """Do nothing."""

    def withdraw(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class StandIn:
    """Watches the training thread of one rank, and acts for it when it stalls.

    Its thread sleeps between looks at the clock and calls the group only while the training thread does not.
    """

    def __init__(self, run: Run, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._run, self._clock = run, clock
        self._changed = threading.Condition()
        self._walls: deque[float] = deque(maxlen=_USUAL_OF)
        self._passed: deque[Passed] = deque(maxlen=REMEMBERED)
        self._usual_step_s = 0.0
        self._current: Settling | None = None
        """The step whose own work is under way; None: there is none, or it was taken over."""
        self._num_samples, self._since_s = 0, 0.0
        """Of the micro-batch in hand."""
        self._interruptible = False
        self._taken_over = False
        """The training thread does not know yet that it was stood in for."""
        self._acting = self._looking = self._back = self._closed = False
        self._settled: deque[Settling] = deque()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, name="ragtag-stand-in", daemon=True)
        self._thread.start()

    def settled(self, number: int) -> Settling | None:
        """Return step `number` if it was settled here, waiting while it is about to be; raise what ended that."""
        if not (self._acting or self._settled or self._error):
            return None
        with self._changed:
            self._come_back()
            # What comes next here may be any call of the group, so nobody else must be inside one, but for the very
            # step that this thread turns to next.
            while self._acting and (self._looking or not self._settled):
                self._changed.wait()
            if self._settled:
                assert self._settled[0].number == number, "steps are applied in the order in which they were settled"
                return self._settled.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    @contextmanager
    def covering(self, settling: Settling) -> Iterator[None]:
        """The rank's own work of a step."""
        with self._changed:
            self._current, self._interruptible = settling, False
        try:
            yield
        finally:
            with self._changed:
                self._current, self._interruptible = None, False

    def begin_micro_batch(self, num_samples: int) -> None:
        """From here on a stand-in may take over."""
        with self._changed:
            self._num_samples, self._since_s = num_samples, self._clock()
            self._interruptible = self._current is not None

    def begin_forward(self) -> None:
        """The data is there. Raises StoodIn if a stand-in has taken over."""
        if self._taken_over:
            raise StoodIn

    def begin_backward(self) -> None:
        """From here on none may. Raises StoodIn if one has."""
        with self._changed:
            self._interruptible = False
            # After a stall too: whose forward always takes that long is slow, not stalled.
            self._passed.append(Passed(self._num_samples, self._clock() - self._since_s))
            if self._taken_over:
                raise StoodIn

    def set_aside(self) -> None:
        """The micro-batch in hand has failed: from here on none may, until the next one begins. Raises StoodIn if one
        has."""
        with self._changed:
            self._interruptible = False
            if self._taken_over:
                raise StoodIn

    def begin_step(self, number: int) -> None:
        """Where a rank is absent, one of the others tells its stand-in that this step has begun."""
        absent, group = self._run.absent, self._run.group
        if absent and group.rank == min(set(range(group.world_size)) - absent, default=-1):
            group.post(self._begun(number))

    def finished(self, settling: Settling, wall_s: float) -> None:
        """A step was applied, so many seconds after the training thread turned to it."""
        if settling.away:
            return  # most of it had been done before
        self._walls.append(wall_s)
        if len(self._walls) >= _LEAST_STEPS:
            self._usual_step_s = median(self._walls)

    def withdraw(self) -> None:
        """Return when nobody acts for the training thread: its step has failed, and the group was told."""
        with self._changed:
            self._come_back()
            self._changed.wait_for(lambda: not self._acting, self._run.group.patience_s)

    def close(self) -> None:
        """End the thread; it may still be inside a call that the group's end will wake."""
        with self._changed:
            self._closed = True
            self._come_back()
        self._thread.join(timeout=0.5)

    def _come_back(self) -> None:
        self._back, self._taken_over = True, False
        self._changed.notify_all()

    def _watch(self) -> None:
        make_current(self._run.device)
        with self._changed:
            while not self._closed:
                self._changed.wait(self._nap_s())
                settling = self._take_over()
                if settling is None:
                    continue
                self._changed.release()
                try:
                    self._act(settling)
                except BaseException as error:
                    self._error = error
                finally:
                    self._changed.acquire()
                    self._acting = False
                    self._changed.notify_all()
                    del settling  # its tensors; the next one may be hours away

    def _nap_s(self) -> float:
        """Until the step under way can be late, or one that begins meanwhile; then look more often."""
        nap_s = self._usual_step_s or _UNKNOWN_NAP_S
        if self._current is not None and self._usual_step_s > 0:
            late_in_s = self._current.started_s + late_s(nap_s) - self._clock()
            nap_s = late_in_s if late_in_s > 0 else nap_s / 16
        return min(max(nap_s, _SHORTEST_NAP_S), _LONGEST_NAP_S)

    def _take_over(self) -> Settling | None:
        """The step to settle, if the training thread is overdue; it will be told when it comes back."""
        settling = self._current
        if settling is None or not self._interruptible:
            return None
        now_s, step_s = self._clock(), self._usual_step_s
        if now_s - settling.started_s <= late_s(step_s) or not stalled(
            since_step_s=now_s - settling.started_s,
            since_micro_batch_s=now_s - self._since_s,
            step_s=step_s,
            usual_s=usual_s(self._passed, self._num_samples, fixed=self._fixed()),
        ):
            return None
        self._current, self._interruptible = None, False
        self._acting, self._taken_over, self._back = True, True, False
        return settling

    def _fixed(self) -> float:
        controller, rank = self._run.controller, self._run.group.rank
        return controller.speeds[rank].fixed.size(1, 1) - 1 if controller is not None else 0.0

    def _act(self, settling: Settling) -> None:
        began_s, kept_bytes = self._clock(), 0
        while True:
            complete = settling.settle(None)
            with self._changed:
                self._settled.append(settling)
                self._changed.notify_all()
            if settling.regroups:
                return  # there is no next step in this generation
            if not complete or kept_bytes > _MOST_BYTES or self._clock() - began_s > self._run.group.patience_s:
                return
            if not self._others_begin(settling.number + 1):
                return
            settling = Settling(self._run, settling.number + 1, after=settling)
            assert isinstance(settling.sums, NoSums)
            kept_bytes += settling.sums.num_bytes

    def _others_begin(self, number: int) -> bool:
        """Wait until the others have begun step `number`, or the training thread is back, whichever is first."""
        group, name = self._run.group, self._begun(number)
        poll_s = min(max(self._usual_step_s / 8, _SHORTEST_POLL_S), _LONGEST_POLL_S)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._back, poll_s)
                if self._back:
                    return False
                self._looking = True
            try:
                if (failure := group.failure) is not None:
                    raise failure
                work = group.posted(name)
                group.wait(work, "standing in for the training thread")
            finally:
                with self._changed:
                    self._looking = False
                    self._changed.notify_all()
            if work.result:
                return True

    def _begun(self, number: int) -> str:
        """What is trained is in the name: a rank that has frozen other parameters since is not to be joined. So is how
        many steps were agreed on, which tells a step that is done again after a `load` from the first time."""
        run, gradients = self._run, self._run.gradients_in_use
        fingerprint = gradients.fingerprint if gradients else ""
        return f"step {number} of {run.generation}, the {run.num_settled}th: {fingerprint}"
