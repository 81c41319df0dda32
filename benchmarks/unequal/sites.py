"""Two sites on a virtual clock: real training, real merges, real decisions; only what steps and bytes take is assumed.

The one idea: losses are those of real training, one island after the other in the order of their clocks, through the
classes that a run uses (`outer.island`, `outer.values`, `outer.rounds`, `outer.tempo`, `runtime.islands`). The clock's
unit is what a device of speed 1 takes for one sequence.
"""

import heapq
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ragtag.examples.byte_gpt import ByteGPT, StandardLibrary, loss_fn
from ragtag.outer import rounds
from ragtag.outer.codec import decode, encoded_bytes
from ragtag.outer.island import InFlight, IslandValues
from ragtag.outer.protocol import Beat, Tempo, Wanted
from ragtag.outer.tempo import Tuner
from ragtag.outer.values import FragmentValues
from ragtag.plan.apportion import apportion
from ragtag.runtime.islands.cut import Cut
from ragtag.runtime.islands.pace import Pace

CONTEXT = 32
BATCH = 16
HELD_OUT = 2048
LOOKED_AT = 256
"""Of them, for a point of a curve."""
CLIP = 1.0
LAST_RATE = 0.05
SPEEDS = ((1.0, 1.0), (0.5, 0.5))
"""By site, its devices'."""
JITTER = 0.1
"""Standard deviation of the logarithm of what a sequence takes."""
LAN = 0.5
"""Units of a synchronisation inside a site."""
FULL_EXCHANGE = 550.0
"""Units in which all numbers travel there and back in fp32: about 100 steps of the four devices."""
_KNOWN_AFTER = 8


@dataclass
class Outcome:
    """One training run."""

    loss: float
    """Held-out, of the values at the end."""
    sequences: int
    units: float
    """Until the last step; the last round comes on top."""
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    """Units, sequences and held-out loss."""
    about: dict[str, Any] = field(default_factory=dict)


class Data:
    """Windows of the standard library's sources; the last ones are held out."""

    def __init__(self) -> None:
        texts = StandardLibrary(context=CONTEXT)
        numbers = torch.arange(len(texts)) * CONTEXT
        windows = texts.bytes[numbers[:, None] + torch.arange(CONTEXT + 1)].long()
        windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(7))]
        self.held_out, self._windows = windows[:HELD_OUT], windows[HELD_OUT:]

    def stream(self, seed: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        """Batches of an order of their own, epoch after epoch."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.long)

        def take(size: int) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal order
            if len(order) < size:
                order = torch.cat((order, torch.randperm(len(self._windows), generator=generator)))
            chosen, order = order[:size], order[size:]
            windows = self._windows[chosen]
            return windows[:, :-1], windows[:, 1:]

        return take

    def loss(self, model: torch.nn.Module, count: int = HELD_OUT) -> float:
        """Of the first `count` windows that are held out."""
        windows = self.held_out[:count]
        with torch.no_grad():
            return float(loss_fn(model, (windows[:, :-1], windows[:, 1:])))


class Replica:
    """A model in training.

    Args:
        start: parameters and optimizer's state; None: random parameters.
        rate: peak learning rate.
        total: sequences after which it has fallen to a twentieth, along a cosine; None: it stays.
    """

    def __init__(self, data: Data, seed: int, rate: float, start: Path | None, total: int | None) -> None:
        torch.manual_seed(seed)
        self.model = ByteGPT(width=96, num_layers=2, num_heads=4, context=CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True)
        if start is not None:
            both = torch.load(start)
            self.model.load_state_dict(both["model"])
            self.optimizer.load_state_dict(both["optimizer"])
        self._rate, self._total = rate, total
        self.take = data.stream(1000 * seed + 17)

    def train(self, size: int, done: float) -> float:
        """One step of `size` sequences after `done` of all replicas together; return its loss."""
        part = 0.0 if self._total is None else min(1.0, done / self._total)
        rate = self._rate * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * part)) / 2)
        if self._total is None:
            rate = self._rate * min(1.0, (done / BATCH + 1) / 50)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = loss_fn(self.model, self.take(size))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return float(loss.detach())

    def save(self, path: Path) -> None:
        """Write what others can start from."""
        new = path.with_suffix(".new")
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, new)
        new.replace(path)


class Times:
    """What steps take: the slowest device's sequences, each with its luck, and a synchronisation."""

    def __init__(self, seed: int) -> None:
        self._luck = torch.Generator().manual_seed(seed)

    def step(self, size: int, speeds: Sequence[float]) -> float:
        """Units of a step of `size` sequences that are shared out by speed."""
        parts = apportion(size, [round(100 * speed) for speed in speeds])
        longest = 0.0
        for count, speed in zip(parts, speeds):
            noise = torch.randn(count, generator=self._luck) * JITTER - JITTER**2 / 2
            longest = max(longest, float(noise.exp().sum()) / speed)
        return longest + (LAN if len(parts) > 1 else 0.0)

    def rate(self, speeds: Sequence[float], *, exchange: float = 0.0, every: int = 1, steps: int = 400) -> float:
        """Sequences a unit of exact steps, where an exchange follows every so many of them."""
        units = sum(self.step(BATCH, speeds) for _ in range(steps))
        return BATCH * steps / (units + exchange * steps / every)


def exact(
    data: Data,
    seed: int,
    rate: float,
    start: Path | None,
    sequences: int,
    *,
    decay: bool = True,
    look: Callable[[int, Replica], None] = lambda done, replica: None,
) -> Replica:
    """The plain run: what all exact methods come to, whatever they take. `look` is called after each step."""
    replica = Replica(data, seed, rate, start, sequences if decay else None)
    for done in range(0, sequences, BATCH):
        replica.train(BATCH, done)
        look(done, replica)
    return replica


@dataclass
class _Island:
    number: int
    replica: Replica
    values: IslandValues
    size: int
    now: float = 0.0
    steps: int = 0
    sequences: int = 0
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By fragment, sequences and steps at the time it was sent last."""
    uplink: float = 0.0
    downlink: float = 0.0
    """Until when each is busy."""
    coming: list[tuple[float, int, int, memoryview, int, str]] = field(default_factory=list)
    took: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=16))


class Sites:
    """Islands with an outer loop, as `mode="islands"` and `mode="async"` have it.

    Args:
        rate: of the inner optimizer, at its peak.
        sequences: of all islands together, until training ends.
        wanted: of the outer loop.
        fragments: P.
        away: units between which the second site is not there; None: it always is.
        waits: an island trains on only once what it has sent is merged and back.
    """

    def __init__(
        self,
        data: Data,
        seed: int,
        rate: float,
        start: Path,
        sequences: int,
        wanted: Wanted,
        *,
        fragments: int = 4,
        speeds: Sequence[Sequence[float]] = SPEEDS,
        away: tuple[float, float] | None = None,
        waits: bool = False,
        curve_every: int = 0,
    ) -> None:
        self._data, self._total, self._wanted, self._speeds = data, sequences, wanted, speeds
        self._away, self._waits, self._curve_every = away, waits, curve_every
        self._times = Times(seed + 5)
        self._tuner = Tuner(wanted, None)
        self._islands: list[_Island] = []
        for number in range(len(speeds)):
            replica = Replica(data, seed, rate, start, sequences)
            replica.take = data.stream(1000 * seed + 100 + number)
            values = IslandValues(str(number), "study")
            self._islands.append(_Island(number, replica, values, 0))
        self._cuts = [Cut(each.replica.model, fragments) for each in self._islands]
        self._numel = self._cuts[0].numel
        first = [self._cuts[0].take(p) for p in range(fragments)]
        self._hub = [FragmentValues(each.clone()) for each in first]
        for island in self._islands:
            island.values.begin([each.clone() for each in first], [1] * fragments, [0] * fragments)
            island.sent = dict.fromkeys(range(fragments), (0, 0))
        self._paces = [Pace(fragments, 0, self._tuner.tempo.inner_steps) for _ in self._islands]
        self._rounds: list[rounds.Round | None] = [None] * fragments
        self._merged: list[dict[int, int]] = [{} for _ in range(fragments)]
        self._pending: list[dict[int, int]] = [{} for _ in range(fragments)]
        self._opened: dict[int, int] = {}
        self._arriving: list[tuple[float, int, int, InFlight]] = []
        self._order = 0
        self._merges = 0
        self._sent_bytes = 0
        self._late = 0
        total = sum(map(sum, speeds))
        for island in self._islands:
            island.size = max(1, round(BATCH * sum(speeds[island.number]) / total))

    # The clock

    def run(self) -> Outcome:
        """Train until all sequences are used, merge for the last time in fp32, and look at the values."""
        curve: list[tuple[float, int, float]] = []
        while (done := sum(each.sequences for each in self._islands)) < self._total:
            island = min(self._islands, key=lambda each: each.now)
            self._hub_until(island.now)
            if self._away is not None and island.number == 1 and self._away[0] <= island.now < self._away[1]:
                island.now = self._away[1]
                continue
            self._boundary(island)
            if self._waits and island.values.in_flight:
                island.now = self._next_after(island)
                continue
            self._train(island, done)
            if self._curve_every and done // self._curve_every != (done + island.size) // self._curve_every:
                curve.append((island.now, done, self._data.loss(self._values(), LOOKED_AT)))
        units = max(each.now for each in self._islands)
        last_round = self._last_round() - units
        tempo = self._tuner.tempo
        about = {
            "inner_steps": tempo.inner_steps,
            "why": tempo.reason,
            "merges": self._merges,
            "sent_bytes": self._sent_bytes,
            "late": self._late,
            "last_round": last_round,
        }
        loss = self._data.loss(self._values())
        return Outcome(loss, sum(each.sequences for each in self._islands), units, curve, about)

    def _next_after(self, island: _Island) -> float:
        """When the next thing happens that an island may be waiting for."""
        if island.coming:
            return max(island.now, island.coming[0][0])
        others = [each.now for each in self._islands if each is not island and not each.values.in_flight]
        return max(island.now, min([*others, *(each[0] for each in self._arriving)])) + 1e-6

    def _train(self, island: _Island, done: float) -> None:
        took = self._times.step(island.size, self._speeds[island.number])
        island.replica.train(island.size, done)
        island.now += took
        island.took.append((took, island.size))
        island.steps += 1
        island.sequences += island.size

    def _boundary(self, island: _Island) -> None:
        """What is done between two steps: take in what has arrived, send what is due."""
        values = island.values
        self._take_in(island)
        self._measure()
        tempo = self._tuner.tempo
        versions = dict(enumerate(values.versions))
        for fragment in self._paces[island.number].due(
            island.steps, tempo.inner_steps, opened=self._opened, versions=versions
        ):
            self._send(island, fragment, tempo)

    def _take_in(self, island: _Island) -> None:
        """Add what has arrived by now."""
        values, cut = island.values, self._cuts[island.number]
        while island.coming and island.coming[0][0] <= island.now:
            _, fragment, version, data, merged, codec = heapq.heappop(island.coming)
            values.update(fragment, version, data, codec)  # pyright: ignore[reportArgumentType]
            values.arrive(fragment, merged)
        while arrivals := values.arrivals:
            for fragment, correction in arrivals.items():
                cut.add(fragment, correction)
            values.added(list(arrivals))

    def _send(self, island: _Island, fragment: int, tempo: Tempo, *, final: bool = False) -> None:
        if not island.values.reserve(fragment):
            return
        sequences, steps = island.sent[fragment]
        flight = island.values.send(
            fragment,
            self._cuts[island.number].take(fragment),
            tokens=float(max(1, island.sequences - sequences)),
            samples=island.sequences - sequences,
            steps=max(1, island.steps - steps),
            step=island.steps,
            codec="fp32" if final else tempo.codec,
            final=final,
        )
        island.sent[fragment] = island.sequences, island.steps
        self._paces[island.number].sent(fragment, island.steps)
        island.uplink = max(island.uplink, island.now) + self._way(len(flight.data))
        self._sent_bytes += len(flight.data)
        self._order += 1
        heapq.heappush(self._arriving, (island.uplink, self._order, island.number, flight))

    def _way(self, num_bytes: int) -> float:
        return FULL_EXCHANGE / 2 * num_bytes / (4 * sum(self._numel))

    def _measure(self) -> None:
        """Tell the tuner what islands would, and take over what it says."""
        if any(len(each.took) < _KNOWN_AFTER for each in self._islands):
            return
        codec = self._tuner.tempo.codec
        exchange = 2 * self._way(sum(encoded_bytes(codec, each) for each in self._numel))
        beats: dict[str, Beat] = {}
        for island in self._islands:
            inner = statistics.median(took for took, _ in island.took)
            rate = statistics.median(size / took for took, size in island.took)
            beats[str(island.number)] = Beat(
                step=island.steps, inner_s=inner, outer_s=exchange, samples_per_s=rate, training=True
            )
        self._tuner.measured(beats, lambda _: None)
        for name, share in self._tuner.tempo.shares:
            self._islands[int(name)].size = max(1, round(BATCH * share))

    # The hub

    def _hub_until(self, now: float) -> None:
        while self._arriving and self._arriving[0][0] <= now:
            at, _, number, flight = heapq.heappop(self._arriving)
            self._contribute(at, number, flight)
        for fragment in range(len(self._hub)):
            self._merge_if_due(fragment, now)

    def _contribute(self, at: float, number: int, flight: InFlight) -> None:
        offer, fragment = flight.offer, flight.offer.fragment
        values = self._hub[fragment]
        weight = values.add(
            decode(offer.codec, flight.data, self._numel[fragment]),
            tokens=offer.tokens,
            steps=offer.steps,
            base=offer.base,
            oldest=self._wanted.oldest,
        )
        self._late += values.version > offer.base
        self._rounds[fragment] = rounds.contributed(
            self._rounds[fragment], str(number), weight, present=self._present(at), now_s=at, final=offer.final
        )
        self._pending[fragment][number] = offer.sequence
        self._opened[fragment] = values.version
        self._merge_if_due(fragment, at)

    def _present(self, at: float) -> int:
        gone = self._away is not None and self._away[0] <= at < self._away[1]
        return len(self._islands) - gone

    def _merge_if_due(self, fragment: int, now: float) -> None:
        round_, tempo = self._rounds[fragment], self._tuner.tempo
        if round_ is None:
            return
        present = [str(number) for number in range(self._present(now))]
        inner = max((each.took[-1][0] for each in self._islands if each.took), default=0.0)
        if not tempo.asynchronous and not rounds.why_closed(
            round_, present, inner_steps=tempo.inner_steps, inner_s=inner, patience_s=1e9, now_s=now
        ):
            return
        part = 1 / len(present) if tempo.asynchronous else 1.0
        codec = "fp32" if round_.final else tempo.codec
        values = self._hub[fragment]
        data, _ = values.close(rate=tempo.rate * part, momentum=self._tuner.momentum, codec=codec)
        self._merges += 1
        self._merged[fragment].update(self._pending[fragment])
        self._rounds[fragment], self._pending[fragment] = None, {}
        for island in self._islands:
            island.downlink = max(island.downlink, now) + self._way(len(data))
            merged = self._merged[fragment].get(island.number, 0)
            heapq.heappush(island.coming, (island.downlink, fragment, values.version, data, merged, codec))

    def _last_round(self) -> float:
        """All send what is left, in fp32, and wait; return when everybody has the values."""
        for island in self._islands:
            while island.values.in_flight or island.coming:
                later = [each[0] for each in island.coming] + [each[0] for each in self._arriving]
                island.now = max(island.now, min(later)) if later else island.now + 1.0
                self._hub_until(island.now)
                self._take_in(island)
        for island in self._islands:
            for fragment in range(len(self._hub)):
                self._send(island, fragment, self._tuner.tempo, final=True)
        while self._arriving:
            self._hub_until(self._arriving[0][0])
        self._hub_until(1e12)
        return max(max(island.now, *(each[0] for each in island.coming)) for island in self._islands)

    def _values(self) -> torch.nn.Module:
        model = ByteGPT(width=96, num_layers=2, num_heads=4, context=CONTEXT)
        cut = Cut(model, len(self._hub))
        for fragment, values in enumerate(self._hub):
            cut.put(fragment, values.values)
        return model
