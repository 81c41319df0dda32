"""The rank of an island that speaks for it: takes snapshots, hands out what has arrived, measures.

The one idea: everything that waits is on the client's thread. This object is asked at step boundaries and answers at
once; what it says goes to all ranks of the island in one header, so they all do the same.
"""

import logging
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from ragtag import __version__
from ragtag.checkpoint.file import load_file, save_file
from ragtag.core.config import Config
from ragtag.core.hub_address import hub_address
from ragtag.core.values import StepReport
from ragtag.outer.client import IslandClient
from ragtag.outer.protocol import Attach, Beat, Codec, Reading, Wanted
from ragtag.runtime.islands.cut import Cut
from ragtag.runtime.islands.pace import Pace

log = logging.getLogger("ragtag")

_REMEMBERED = 16
"""Steps whose times are compared."""
_COMPARED = 4
"""Steps before and after an arrival whose losses are compared."""
_SAY_EVERY_S = 10.0


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the outer loop is, and who this island is in it."""

    hub: str
    island: str
    run: str
    session: str = ""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader tells all ranks of its island between two steps."""

    fragments: tuple[int, ...] = ()
    """Of which corrections follow."""
    values: bool = False
    """What follows are not corrections but the values themselves."""
    done: bool = True
    """Whether all go on with the next step; else the next header follows."""
    offset: float | None = None
    """Steps of all islands together, less those of this one; None: as before."""
    batch: int = 0
    """Samples of this island's next steps; 0: as before."""
    jump: int | None = None
    """All go on after this step, with the state that follows."""
    begun: bool = False
    """Whether islands train side by side from now on."""
    error: str = ""


def wanted(config: Config) -> Wanted:
    """What the script's configuration says of the outer loop."""
    if config.mode == "exact":
        return Wanted(inner_steps=1, blocking=True, codec="fp32", rate=1.0, momentum=0.0)
    if config.mode == "async":
        # Each contribution by itself, for its island's part; late ones are what it lives of.
        return Wanted(inner_steps=config.inner_steps, asynchronous=True, rate=1.0, momentum=0.0, oldest=8)
    return Wanted(inner_steps=config.inner_steps)


class Leader:
    """The first rank of an island.

    Args:
        place: where to connect.
        cut: of the model.
        config: of the run.
        batch: samples of a step of all islands together.
        dataset: samples of this island's data.
        committed: asked for the number of steps that are done.
        connect: makes the client, as `IslandClient` is made.
    """

    def __init__(
        self,
        place: Place,
        cut: Cut,
        config: Config,
        *,
        batch: int,
        dataset: int = 1,
        committed: Callable[[], int],
        connect: Callable[..., IslandClient] = IslandClient,
    ) -> None:
        self.cut, self._config, self._batch, self._island = cut, config, batch, place.island
        self._committed = committed
        address, port = hub_address(place.hub)
        session = os.urandom(8).hex()
        self._speed: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)
        self._tokens = 0.0
        self._samples = 0
        self._sent_at: list[tuple[float, int, int]] = [(0.0, 0, 0)] * cut.num_fragments
        """By fragment: tokens, samples and steps that were done when it was sent last."""
        self._steps_at_send: dict[int, int] = {}
        self._pace: Pace | None = None
        self._before: tuple[float, float] | None = None
        """Mean of the losses before an arrival, and its standard error."""
        self._since_arrival: list[float] = []
        self._arrived: tuple[int, int] = (0, 0)
        self.batch_now = batch
        """Samples of a step of this island."""
        self.last_sent = False
        """Whether everything was sent for the last round."""
        self.waited_s = 0.0
        """Seconds for which this island has waited for exchanges."""
        self._compute_s = 0.0
        self._said_s = 0.0
        self.client = connect(
            address,
            port,
            os.environ.get("RAGTAG_TOKEN", ""),
            lambda: Attach(
                run=place.run,
                version=__version__,
                island=place.island,
                session=session,
                model=cut.hash,
                numel=cut.numel,
                data=config.data,
                dataset=dataset,
                batch=batch,
                wanted=wanted(config),
                step=committed(),
                samples_per_s=self.samples_per_s,
                training=self._pace is not None,
            ),
            patience_s=config.patience_s,
        )

    # Measuring

    @property
    def samples_per_s(self) -> float:
        """How fast this island is; 0: not known yet."""
        rates = [samples / wall_s for wall_s, samples in self._speed if wall_s > 0]
        return statistics.median(rates) if len(rates) >= 4 else 0.0

    @property
    def inner_s(self) -> float:
        """Seconds of a step; 0: not known yet."""
        return statistics.median(wall_s for wall_s, _ in self._speed) if len(self._speed) >= 4 else 0.0

    def stepped(self, report: StepReport) -> None:
        """A step was applied."""
        self._tokens += report.weight
        self._samples += report.samples
        self._speed.append((report.wall_s, report.samples))
        self._compute_s += report.wall_s
        if not report.skipped:
            self._losses.append(report.loss)
            self._compare(report.loss)
        self.client.note(self._beat(report.number))

    def _beat(self, step: int, *, finished: bool = False) -> Beat:
        return Beat(
            step=step,
            inner_s=self.inner_s,
            outer_s=self.client.talk.exchange_s * self.cut.num_fragments,
            waited_s=self.waited_s,
            compute_s=self._compute_s,
            samples_per_s=self.samples_per_s,
            training=self._pace is not None,
            finished=finished,
        )

    def _compare(self, loss: float) -> None:
        if self._before is None:
            return
        self._since_arrival.append(loss)
        if len(self._since_arrival) < _COMPARED:
            return
        before, before_error = self._before
        after, after_error = _mean(self._since_arrival)
        fragment, version = self._arrived
        noise = (before_error**2 + after_error**2) ** 0.5
        self.client.say(Reading(fragment=fragment, version=version, before=before, after=after, noise=noise))
        self._before, self._since_arrival = None, []

    # Sending

    def begin(self, committed: int) -> None:
        """Islands train side by side from the step after `committed` on."""
        tempo = self.client.talk.tempo
        self._pace = Pace(self.cut.num_fragments, committed, 25 if tempo is None else tempo.inner_steps)
        self._sent_at = [(self._tokens, self._samples, committed)] * self.cut.num_fragments
        beat = self._beat(committed)
        self.client.note(beat)
        self.client.say(beat)

    def due(self, committed: int) -> list[int]:
        """Fragments that are to be sent after step `committed`, and can be."""
        client, pace = self.client, self._pace
        if pace is None or client.talk.tempo is None:
            return []
        with client.lock:
            versions = dict(enumerate(client.talk.values.versions))
            due = pace.due(committed, client.talk.tempo.inner_steps, opened=client.talk.opened, versions=versions)
            return [fragment for fragment in due if not client.talk.values.is_busy(fragment)]

    def send(self, committed: int, fragments: list[int], *, final: bool = False) -> None:
        """Hand over snapshots."""
        self._recount()
        tempo = self.client.talk.tempo
        codec: Codec = "fp32" if final or tempo is None else tempo.codec
        for fragment in fragments:
            tokens, samples, steps = self._sent_at[fragment]
            if committed <= steps:
                continue
            sent = self.client.send(
                fragment,
                partial(self.cut.take, fragment),
                tokens=max(self._tokens - tokens, 1e-9),
                samples=self._samples - samples,
                steps=max(1, committed - steps),
                step=committed,
                codec=codec,
                final=final,
            )
            if not sent:
                continue
            self._sent_at[fragment] = (self._tokens, self._samples, committed)
            if fragment == 0:
                self._steps_at_send[0] = committed
            if self._pace is not None:
                self._pace.sent(fragment, committed)

    def _recount(self) -> None:
        """What was refused goes with the next delta, and counts there."""
        with self.client.lock:
            for offer in self.client.talk.take_refused():
                tokens, samples, steps = self._sent_at[offer.fragment]
                self._sent_at[offer.fragment] = (tokens - offer.tokens, samples - offer.samples, steps - offer.steps)
                self.last_sent = self.last_sent and not offer.final

    # Arriving

    @property
    def has_news(self) -> bool:
        """Whether something has arrived that all ranks of the island are to add."""
        with self.client.lock:
            return bool(self.client.talk.values.arrivals) or self._new_batch() != 0

    def _new_batch(self) -> int:
        tempo = self.client.talk.tempo
        shares = {} if tempo is None else dict(tempo.shares)
        if self._pace is None or self._island not in shares:
            return 0
        wanted_size = max(1, round(shares[self._island] * self._batch))
        return 0 if wanted_size == self.batch_now else wanted_size

    def news(self, committed: int) -> tuple[Header, list[torch.Tensor]]:
        """What all ranks are to add, and to know."""
        client = self.client
        with client.lock:
            arrivals = client.talk.values.arrivals
            header = Header(
                fragments=tuple(arrivals),
                offset=self._offset(committed) if 0 in arrivals else None,
                batch=self._new_batch(),
            )
            return header, list(arrivals.values())

    def _offset(self, committed: int) -> float | None:
        sent_after = self._steps_at_send.get(0)
        if sent_after is None or 0 in self.client.talk.values.in_flight:
            return None
        offset = self.client.talk.step - sent_after
        return offset if abs(offset) >= 1 else 0.0

    def added(self, fragments: tuple[int, ...]) -> None:
        """All ranks have added them."""
        client = self.client
        with client.lock:
            client.talk.values.added(fragments)
            version = client.talk.values.versions[fragments[-1]] if fragments else 0
        if fragments and self._before is None and len(self._losses) >= _COMPARED:
            self._arrived = fragments[-1], version
            self._before = _mean(list(self._losses)[-_COMPARED:])
            self._since_arrival = []

    def nothing_left(self, fragments: tuple[int, ...]) -> bool:
        """Whether nothing else than these is on its way, or here."""
        with self.client.lock:
            busy = {each for each in range(self.cut.num_fragments) if self.client.talk.values.is_busy(each)}
            twice = {each for each in fragments if self.client.talk.values.waiting(each) > 1}
            return busy <= set(fragments) and not twice and not set(self.client.talk.values.in_flight)

    def first_batch(self) -> int:
        """Samples of this island's first steps, until speeds are known: an even part."""
        attached = self.client.talk.attached
        return max(1, self._batch // max(1, 1 if attached is None else attached.islands))

    def settled(self) -> bool:
        """Whether nothing is on its way, in either direction."""
        with self.client.lock:
            return not any(self.client.talk.values.is_busy(fragment) for fragment in range(self.cut.num_fragments))

    def send_last(self, committed: int) -> None:
        """Send what is left; once that is merged, say that it was all."""
        self._recount()
        if not self.last_sent:
            self.send(committed, list(range(self.cut.num_fragments)), final=True)
            self.last_sent = True
            return
        if self.client.said_finished:
            return
        self.client.said_finished = True
        beat = self._beat(committed, finished=True)
        self.client.note(beat)
        self.client.say(beat)

    # Beginning

    def give(self, tree: Any, committed: int) -> None:
        """Send the values that all islands begin with, and the state of the optimizer and what else there is."""
        values = [self.cut.take(fragment) for fragment in range(self.cut.num_fragments)]
        with tempfile.TemporaryDirectory(prefix="ragtag-") as directory:
            path = Path(directory) / "state"
            save_file(path, tree)
            state = path.read_bytes()
        self.client.give(values, state, step=committed)

    def taken_state(self) -> Mapping[str, Any]:
        """The tree that another island's leader gave."""
        assert self.client.talk.state is not None
        with tempfile.TemporaryDirectory(prefix="ragtag-") as directory:
            path = Path(directory) / "state"
            path.write_bytes(self.client.talk.state)
            self.client.talk.state = b""
            return load_file(path)

    def say(self, text: str) -> None:
        """Tell what is waited for, now and then."""
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAY_EVERY_S:
            self._said_s = now_s
            log.info("island %s: %s", self._island, text)


def _mean(values: list[float]) -> tuple[float, float]:
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return mean, spread / len(values) ** 0.5
