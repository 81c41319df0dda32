"""A group whose ranks come and go: one `Group` for the whole run, and behind it a new inner group each generation.

The one idea: inside a generation membership is fixed and everything works, or everything fails. Whatever fails there
surfaces as `GenerationEnded`; the training thread then calls `regroup`, which asks the hub who is still here and
returns in the next generation. What that means for the step in hand is the caller's business (docs/membership.md).
"""

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from ragtag.comm.judge import described
from ragtag.comm.passing import GenerationEnded, Inner, PassingGroup
from ragtag.comm.standing import Evicted, Form, Hub, HubLost, RunOver, Standing
from ragtag.comm.transport import TransportError
from ragtag.core.errors import LaunchError, PeerError, PeerFailed
from ragtag.hub.frames import (
    Beat,
    Checkpointed,
    End,
    Fail,
    Frame,
    FromHub,
    Go,
    Leave,
    Member,
    Pointed,
    Prep,
    Ready,
    Refused,
    Started,
    Trouble,
    Welcome,
)
from ragtag.hub.worker_rules import (
    Instruction,
    WorkerState,
    at_boundary,
    copied,
    on_failure,
    on_go,
    on_prep,
    on_started,
)

log = logging.getLogger("ragtag")

_USER_CODE_PATIENCE = 10
_NAP_S = 0.25
_LOOK_S = 0.02
_COLLECT_EVERY = 8
"""Generations."""


class ElasticGroup(PassingGroup):
    """The ranks of an elastic run, as seen from one of them.

    Args:
        member: this worker, as others know it.
        patience_s: bounds every wait, in seconds; ten times that where others run the user's code.
        form: makes a generation's group.
        where: the hub's address, for messages.
        may_leave: Ctrl-C on this worker is no end of the run; it just leaves.
    """

    def __init__(
        self, *, member: Member, patience_s: float, form: Form, where: str = "the hub", may_leave: bool = False
    ) -> None:
        super().__init__(member, patience_s)
        self.is_newcomer = False
        """Whether this rank copies its state from a veteran."""
        self.standing = Standing()
        self._form, self._where, self._may_leave = form, where, may_leave
        self._checkpoint = ""
        self._hub: Hub | None = None
        self._num_left = 0
        """Generations that this worker was in and is no more."""
        self._changed = threading.Condition()
        self._state = WorkerState(inc=member.inc)
        self._pending: deque[Prep | Go] = deque()
        self._over: End | Refused | None = None
        self._leaving: list[threading.Thread] = []
        self._closed = self._closed_clean = False

    def attach(self, hub: Hub) -> None:
        """Use this connection; its frames come to `hear`."""
        self._hub = hub

    # What the hub and this worker tell each other

    def hear(self, frame: FromHub) -> None:
        """Take in a frame; called on the connection's thread."""
        with self._changed:
            if isinstance(frame, Prep) and frame.soft and self._state.group:
                self._state, _ = on_prep(self._state, frame)
            elif isinstance(frame, Prep | Go):
                self._pending.append(frame)
                if frame.generation > self._state.group:
                    self._break(frame.reason)
            elif isinstance(frame, Started):
                self._state = on_started(self._state, frame)
            elif isinstance(frame, Welcome):
                self._checkpoint = frame.checkpoint or self._checkpoint
            elif isinstance(frame, Pointed) and frame.moved:
                self._checkpoint = frame.name
            elif isinstance(frame, End | Refused):
                self._over = frame
                self._break(frame.reason)
            self._changed.notify_all()

    def beat(self) -> Beat:
        """This worker's sign of life; called on the connection's thread."""
        return Beat(
            generation=self.generation,
            inc=self.member.inc,
            step=self._step,
            doing=self._doing,
            doing_s=time.monotonic() - self._doing_since_s,
            applied=self.standing.applied,
            applied_digest=self.standing.applied_digest,
        )

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason or "the hub ended this generation"
        if self._inner is not None:
            self._inner.abandon(self._broken)

    # Generations

    @property
    def generation(self) -> int:
        """Number of the generation this worker is in or was in last; 0: none yet."""
        return 0 if self.go is None else self.go.generation

    @property
    def asked_to_regroup(self) -> bool:
        """Newcomers wait for the next step boundary that all agree on."""
        return self._state.flagged > 0

    def regroup(self, standing: Standing, *, agreed: bool = False) -> Go:
        """Leave the generation for ever and return when the next one that this worker is in has formed.

        Args:
            standing: what this worker could bring.
            agreed: all leave at this step boundary, for newcomers; nobody has failed.

        Raises:
            Evicted: the others went on without this worker.
            PeerFailed: the run is over because another worker failed.
            PeerLost: the run is over, or the hub has been away for longer than the patience.
        """
        self.standing = standing
        self._let_go()
        with self._changed:
            self._state = msgspec.structs.replace(
                self._state,
                has_state=standing.has_state,
                applied=standing.applied,
                applied_digest=standing.applied_digest,
                held_digest=standing.held_digest,
            )
            if agreed:
                self._state, instruction = at_boundary(self._state, in_call=standing.in_call)
                self._obey(instruction)
            else:
                self._state = on_failure(self._state)
        began_s = time.monotonic()
        while True:
            go = None
            with self._changed:
                self._raise_if_over()
                if not self._pending:
                    self._wait_for_news(began_s)
                    continue
                began_s = time.monotonic()
                # Since when it has been doing that is what the hub judges by: each attempt is one of its own.
                self._doing, self._doing_since_s = "joining the next generation", began_s
                frame = self._pending.popleft()
                if isinstance(frame, Prep):
                    self._state, instruction = on_prep(self._state, frame, in_call=standing.in_call)
                    self._obey(instruction)
                    continue
                self._state, instruction = on_go(self._state, frame)
                if instruction.do == "evicted":
                    raise Evicted(
                        f"{self.member.name} ({self.member.host}) was given up and the others went on without it: "
                        f"{frame.reason}"
                    )
                if instruction.do == "wait" and self.go is not None:
                    # It has no state to lose, but the hub does not ask this incarnation again.
                    raise Evicted(
                        f"{self.member.name} ({self.member.host}) was taken in, but not for long, and the others went "
                        f"on without it: {frame.reason}"
                    )
                if instruction.do not in ("ignore", "wait"):
                    go = self.go = frame
                    self.is_newcomer = instruction.do == "copy"
                    self._broken = self._superseded(go)
            if go is not None and self._enter(go, instruction.rank):
                return go

    def _superseded(self, go: Go) -> str:
        """Why `go` is out of date before it has begun; empty: it is not. For newcomers that wait nothing is given up.

        The condition is held.
        """
        newer = [each for each in self._pending if each.generation > go.generation]
        soft = [each for each in newer if isinstance(each, Prep) and each.soft]
        for each in newer:
            if each not in soft:
                return each.reason or "a newer generation forms"
        for each in soft:
            self._pending.remove(each)
            self._state, _ = on_prep(self._state, each)  # flagged, now that it is in a generation
        return ""

    def _obey(self, instruction: Instruction) -> None:
        if instruction.join is not None:
            self._send(instruction.join)

    def _enter(self, go: Go, rank: int) -> bool:
        """Form the generation; False: it ended before it had begun."""
        try:
            inner = self._form(go, rank, self)
        except (PeerError, TransportError, LaunchError, RuntimeError) as error:
            self._inner = None
            if not self._broken:  # else the hub knows
                self._fail(described(error), error.rank if isinstance(error, PeerError) else None)
            with self._changed:
                self._state = on_failure(self._state)
            return False
        self.take(inner)
        inner.note(self._step, self._doing)
        return True

    def broken(self) -> bool:
        """Whether the newest generation is over already."""
        return bool(self._broken)

    def take(self, inner: Inner) -> None:
        """From now on `inner` is told when it is over."""
        inner.device_sum = self.device_sum
        with self._changed:
            self._inner = inner
            if self._broken:
                inner.abandon(self._broken)

    def _let_go(self) -> None:
        with self._changed:
            inner, self._inner = self._inner, None
        if inner is not None:
            inner.abandon("this generation is over")
            self._num_left += 1
            # What its errors and their frames hold on to in circles, sockets among it, is freed by the collector only,
            # which may not come by for hours; one look takes some hundredths of a second.
            collects = self._num_left % _COLLECT_EVERY == 0
            thread = threading.Thread(target=_close, args=(inner, collects), name="ragtag-leaving", daemon=True)
            thread.start()
            self._leaving = [*(each for each in self._leaving if each.is_alive()), thread]

    def _wait_for_news(self, began_s: float) -> None:
        """Wait a moment for a frame; the condition is held."""
        hub = self._hub
        assert hub is not None
        lost_s, waited_s = hub.lost_for_s, time.monotonic() - began_s
        if lost_s > self.patience_s:
            raise self._hub_lost("has not been heard")
        # Newcomers wait for as long as the others' step takes.
        if self.standing.has_state and waited_s > (_USER_CODE_PATIENCE + 2) * self.patience_s:
            raise self._hub_lost(f"did not say within {_USER_CODE_PATIENCE + 2} times that long who goes on")
        self._changed.wait(min(_NAP_S, self.patience_s / 4))

    def _hub_lost(self, what: str) -> HubLost:
        # The same words on all workers of a machine, so that they are shown once.
        error = HubLost(
            f"{self._where} {what} (patience_s={self.patience_s:g}), and nobody on {self.member.host} can go on "
            f"without it.{self._last_checkpoint()}"
        )
        error.origin_rank = self.rank
        return error

    def _last_checkpoint(self) -> str:
        return f" The run's last checkpoint is {self._checkpoint}." if self._checkpoint else ""

    def _raise_if_over(self) -> None:
        over = self._over
        if isinstance(over, Refused):
            raise LaunchError(f"{self._where} does not take {self.member.name} ({self.member.host}): {over.reason}")
        if isinstance(over, End):
            if not over.failed:
                raise RunOver(f"{self.member.name} ({self.member.host}): the run is over: {over.reason}.")
            known = self._checkpoint in over.reason
            error = PeerFailed(over.reason if known else f"{over.reason}{self._last_checkpoint()}")
            names = [member.name for member in self.go.members] if self.go is not None else []
            error.origin_rank = names.index(over.origin) if over.origin in names else -1
            raise error

    def _fail(self, reason: str, rank: int | None) -> None:
        """Tell the hub that this generation cannot go on here."""
        go = self.go
        if go is None:
            return
        suspect = go.members[rank].inc if rank is not None and 0 <= rank < len(go.members) else ""
        self._send(
            Fail(
                generation=go.generation,
                inc=self.member.inc,
                reason=reason,
                suspect="" if suspect == self.member.inc else suspect,
            )
        )

    def _send(self, frame: Frame) -> None:
        if self._hub is not None:
            self._hub.send(frame)

    def ready(self) -> None:
        """This rank has the run's state; return when it may vote.

        Raises:
            GenerationEnded: before all members had it.
        """
        self.standing = replace(self.standing, has_state=True)
        with self._changed:
            self._state = copied(self._state, self.standing.applied, self.standing.applied_digest)
        self._send(Ready(generation=self.generation, inc=self.member.inc))
        began_s = time.monotonic()
        with self._changed:
            while not self._state.started and not self._broken:
                self._wait_for_news(began_s)
        if self._broken:
            raise GenerationEnded(self._broken)

    def applied(self, step: int, digest: str) -> None:
        """A step was applied; two attribute writes, told with the next heartbeat."""
        self.standing = replace(self.standing, applied=step, applied_digest=digest)

    def checkpointed(self, step: int, name: str) -> None:
        """A checkpoint of this step lies complete under `name`: from now on it is the run's last one."""
        self._send(Checkpointed(generation=self.generation, inc=self.member.inc, step=step, name=name))

    def send_lines(self, lines: Sequence[bytes]) -> None:
        """Lines for the event log, which the hub writes."""
        if self._hub is not None:
            self._hub.send_lines(self.member.inc, lines)

    def confirm(self) -> None:
        """Raise what has ended the generation. Who has just been frozen does not know yet: the hub, which gives nobody
        up that it has heard within a patience, must have answered within half of one."""
        hub, end_s = self._hub, time.monotonic() + self.patience_s
        while hub is not None and hub.heard_ago_s > self.patience_s / 2 and time.monotonic() < end_s:
            self._raise_failure()
            time.sleep(_LOOK_S)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if (failure := self.failure) is not None:
            raise failure

    @property
    def failure(self) -> PeerError | None:
        """What ended the generation, or the run."""
        inner = self._inner
        failure = inner.failure if inner is not None else None
        if failure is None:
            return GenerationEnded(self._broken) if self._broken else None
        return self._translated(failure)

    def announce_failure(self, error: BaseException, doing: str) -> None:
        """Tell all ranks, and the hub, that this one fails and the run with it; a newcomer's failure is its own."""
        if isinstance(error, PeerError) or self._closed or self._over is not None:
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        if (self.is_newcomer and not self.standing.has_state) or (interrupted and self._may_leave):
            self._send(Leave(generation=self.generation, inc=self.member.inc))
            return
        text = f"{self.member.name} ({self.member.host}) failed at step {self._step}, {doing}: {described(error)}"
        if interrupted:
            text = f"the run was stopped with Ctrl-C on {self.member.host}, at step {self._step}"
        self._send(
            Trouble(
                generation=self.generation,
                inc=self.member.inc,
                step=self._step,
                text=text,
                interrupted=interrupted,
            )
        )
        if self._inner is not None:
            self._inner.announce_failure(error, doing)

    def close(self) -> bool:
        """Leave the run; return whether every thread ended. May be called twice."""
        if not self._closed:
            self._closed = True
            ended = True
            with suppress(PeerError):
                if self._inner is not None:
                    ended = self._inner.close()
            self._send(Leave(generation=self.generation, inc=self.member.inc))
            if self._hub is not None:
                self._hub.close()
            for thread in self._leaving:
                thread.join(timeout=0.5)
            self._closed_clean = ended and not any(thread.is_alive() for thread in self._leaving)
        return self._closed_clean

    def _look_at_hub(self) -> None:
        """Without a hub for longer than the patience others may have gone on without this rank: it contributes no
        more."""
        hub = self._hub
        if hub is not None and not self._broken and (lost_s := hub.lost_for_s) > self.patience_s:
            with self._changed:
                self._break(f"{self._where} has been away for {lost_s:.3g} s")

    def _translated(self, error: PeerError) -> PeerError:
        """A lost rank ends the generation; one that failed, the run."""
        if isinstance(error, PeerFailed):
            return error
        with self._changed:
            first, self._broken = not self._broken, self._broken or str(error)
        if first:
            self._fail(str(error), error.rank)
        return GenerationEnded(str(error), rank=error.rank, host=error.host)


def _close(inner: Inner, collects: bool) -> None:
    inner.close()
    del inner
    if collects:
        gc.collect()
