"""Islands on a virtual clock: the real service, talk, leader, pace and tuner; links and steps only take time.

Each site trains something that is solved in one line, so that a thousand steps take a second.
"""

import heapq
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import torch

import ragtag
from ragtag.core.values import StepReport
from ragtag.outer.protocol import Attach, Beat, Detach, Reading
from ragtag.outer.service import Service
from ragtag.outer.session import Session
from ragtag.outer.store import Store
from ragtag.outer.talk import Talk
from ragtag.runtime.islands.cut import Cut
from ragtag.runtime.islands.leader import Leader, Place
from ragtag.watch.events import Event, Exchanged

PATIENCE_S = 30.0
BEAT_S = 2.0
TICK_S = 0.5
LATENCY_S = 0.02
START = 4.0
"""Every number's value before training; they are to become 0."""


@dataclass
class Link:
    """One site's link to the hub."""

    bytes_per_s: float
    stalled_until: float = 0.0


class World:
    """The hub, a clock, and what is to happen."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.events: list[tuple[float, Event]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.store = Store(directory, run="r")
        self.service = Service(
            self.store,
            run="r",
            version=ragtag.__version__,
            patience_s=PATIENCE_S,
            tell=lambda event: self.events.append((self.now, event)),
            clock=lambda: self.now,
        )
        self.sites: list[Site] = []
        self.after(TICK_S, self._tick)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Let something happen."""
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._number, action))

    def _tick(self) -> None:
        self.service.tick()
        for site in self.sites:
            site.down()
        self.after(TICK_S, self._tick)

    def run(self, until: Callable[[], bool], limit_s: float = 1e5) -> None:
        """Go on until something is so."""
        while not until():
            self.now, _, action = heapq.heappop(self._queue)
            assert self.now < limit_s, "it has not come"
            action()

    def told(self, kind: type, since: float = 0.0) -> list:
        """Events of a kind."""
        return [event for at, event in self.events if isinstance(event, kind) and at >= since]

    def times(self, kind: type, wanted: Callable[[Event], bool] = lambda event: True) -> list[float]:
        """When events of a kind were told."""
        return [at for at, event in self.events if isinstance(event, kind) and wanted(event)]


class _Client:
    """Stands in for `IslandClient`: the same talk, without threads and sockets."""

    def __init__(self, site: "Site", attach) -> None:
        self.site = site
        self.talk = Talk(attach, where="a virtual hub", clock=lambda: site.world.now)
        self.lock = threading.RLock()
        self.error = None
        self.said_finished = False
        self.beat = Beat(step=0)

    def note(self, beat: Beat) -> None:
        self.beat = beat

    def say(self, frame: Reading | Detach | Beat) -> None:
        self.talk.say(frame)
        self.site.up()

    def send(self, fragment: int, take: Callable[[], torch.Tensor], **about: object) -> bool:
        if not self.talk.values.reserve(fragment):
            return False
        self.talk.send(fragment, take(), **about)
        self.site.up()
        return True

    def give(self, values: Sequence[torch.Tensor], state: bytes, *, step: int) -> None:
        self.talk.give(values, state, step=step)
        self.site.up()

    def fetch_all(self, *, state: bool = True) -> None:
        self.talk.fetch_all(state=state)
        self.site.up()


def _with_rate(attach: Callable[[], Attach], rate: float) -> Attach:
    frame = attach()
    return msgspec.structs.replace(frame, wanted=msgspec.structs.replace(frame.wanted, rate=rate))


@dataclass
class Done:
    """What a site has trained."""

    samples: int = 0
    steps: int = 0
    losses: list[float] = field(default_factory=list)


class Site:
    """One island.

    Args:
        speed: samples a second.
        noise: standard deviation of its losses.
        drift: by how much each step moves numbers towards 0.
        rate: of the outer optimizer, where this is the first site; None: as configured.
    """

    def __init__(
        self,
        world: World,
        name: str,
        *,
        speed: float,
        link: Link,
        total: int,
        batch: int = 64,
        noise: float = 0.0,
        drift: float = 0.002,
        rate: float | None = None,
        config: ragtag.Config | None = None,
    ) -> None:
        self.world, self.name, self.speed, self.link, self.total = world, name, speed, link, total
        self.noise, self.drift = noise, drift
        self.model = torch.nn.Linear(64, 60)
        with torch.no_grad():
            for each in self.model.parameters():
                each.fill_(START)
        self.cut = Cut(self.model, 4)
        self.done = Done()
        self.finished = False
        self._luck = torch.Generator().manual_seed(len(world.sites))
        self._stage = "new"
        self._up_busy = self._down_busy = False
        self._connection = 0
        self.client: _Client

        def connect(address, port, token, attach, *, patience_s):
            self.client = _Client(self, attach if rate is None else partial(_with_rate, attach, rate))
            return self.client

        self.leader = Leader(
            Place(hub="hub:1", island=name, run="r"),
            self.cut,
            config or ragtag.Config(patience_s=PATIENCE_S),
            batch=batch,
            committed=lambda: self.done.steps,
            connect=connect,
        )
        self.leader.batch_now = batch
        world.sites.append(self)
        self.session: Session | None = None
        self.connect()
        world.after(0.0, self._turn)
        world.after(BEAT_S, self._pulse)

    # The connection

    def connect(self) -> None:
        """Be there (again)."""
        self._connection += 1
        self.session = Session(self.name)
        self._up_busy = self._down_busy = False
        self._carry_up(self.client.talk.begin())

    def vanish(self) -> None:
        """Be gone, in the middle of whatever it was."""
        session, self.session = self.session, None
        self._connection += 1
        self.client.talk.end()
        assert session is not None
        self.world.service.lost(session, "its connection closed")

    def up(self) -> None:
        """Let the next message go to the hub, if the link is free."""
        if self.session is None or self._up_busy:
            return
        message = self.client.talk.next_message()
        if message is not None:
            self._carry_up(message)

    def down(self) -> None:
        """Let the next message come from the hub, if the link is free."""
        session = self.session
        if session is None or self._down_busy:
            return
        message = session.next_message()
        if message is None:
            if session.closing:  # by the hub: come back, as a client does
                self.vanish()
                self.world.after(1.0, self.connect)
            return
        self._down_busy = True
        connection = self._connection

        def come() -> None:
            if connection == self._connection:
                self.client.talk.heard(message)
                self.up()

        self._carry(message, come, "_down_busy", self.down)

    def _carry_up(self, message: bytes) -> None:
        self._up_busy = True
        session, connection = self.session, self._connection

        def come() -> None:
            if connection == self._connection and session is not None:
                self.world.service.receive(session, message)
                for site in self.world.sites:
                    site.down()

        self._carry(message, come, "_up_busy", self.up)

    def _carry(self, message: bytes, come: Callable[[], None], flag: str, go_on: Callable[[], None]) -> None:
        connection = self._connection

        def free() -> None:
            if connection == self._connection:
                setattr(self, flag, False)
                go_on()

        stall_s = max(0.0, self.link.stalled_until - self.world.now)
        took_s = stall_s + len(message) / self.link.bytes_per_s
        self.world.after(took_s + LATENCY_S, come)
        self.world.after(took_s, free)

    def _pulse(self) -> None:
        if self.client.talk.open:
            self.client.talk.say(self.client.beat)
            self.up()
        self.world.after(BEAT_S, self._pulse)

    # Training

    def _turn(self) -> None:
        """Between two steps; the next turn comes after a step, or a moment later."""
        talk, leader, step = self.client.talk, self.leader, self.done.steps
        if self._stage == "new":
            if talk.stage == "alone" and not talk.values.begun:
                leader.give({}, step)
            if talk.stage == "open" and not talk.values.begun and not talk.fetching:
                talk.fetching = True
                self.client.fetch_all()
            if talk.stage == "open" and talk.values.begun:
                self._stage = "open"
                self.done.steps = max(step, int(talk.step))
                for fragment, values in enumerate(talk.values.values):
                    self.cut.put(fragment, values)
                leader.begin(self.done.steps)
            self.world.after(0.05, self._turn)
        elif step < self.total:
            leader.send(step, leader.due(step))
            self._take_in()
            batch = leader.batch_now
            self.world.after(batch / self.speed, lambda: self._step(batch))
        else:
            self._last_round()

    def _take_in(self) -> None:
        leader = self.leader
        while leader.has_news:
            header, tensors = leader.news(self.done.steps)
            for fragment, tensor in zip(header.fragments, tensors):
                self.cut.add(fragment, tensor)
            leader.batch_now = header.batch or leader.batch_now
            leader.added(header.fragments)

    def _step(self, batch: int) -> None:
        loss = self.loss() + self.noise * float(torch.randn((), generator=self._luck))
        with torch.no_grad():
            for each in self.model.parameters():
                each.mul_(1 - self.drift)
        self.done.steps += 1
        self.done.samples += batch
        self.done.losses.append(loss)
        self.leader.stepped(report(self.done.steps, loss, batch, batch / self.speed))
        self._turn()

    def _last_round(self) -> None:
        talk, leader = self.client.talk, self.leader
        over = talk.stage == "over"
        if leader.settled():
            leader.send_last(self.done.steps)
        self._take_in()
        if over and leader.settled() and talk.newest:
            for fragment, values in enumerate(talk.values.values):
                self.cut.put(fragment, values)
            self.finished = True
            return
        self.world.after(0.1, self._turn)

    def loss(self) -> float:
        """Half of the mean square of all numbers."""
        return float(sum((each.detach() ** 2).sum() for each in self.model.parameters())) / 2 / sum(self.cut.numel)

    @property
    def values(self) -> list[torch.Tensor]:
        """Own numbers, by fragment."""
        return [self.cut.take(fragment) for fragment in range(self.cut.num_fragments)]


def report(number: int, loss: float, samples: int, wall_s: float) -> StepReport:
    """What a step of one rank says."""
    return StepReport(
        number=number,
        loss=loss,
        lr=0.0,
        weight=float(samples),
        samples=samples,
        shares=(samples,),
        wall_s=wall_s,
        compute_s=(wall_s,),
        wait_s=(0.0,),
        comm_s=0.0,
        plan_id="",
    )


def weighed(world: World, island: str) -> float:
    """Samples of an island that merges have counted, by the first fragment."""
    return sum(
        part.tokens
        for event in world.told(Exchanged)
        if event.fragment == 0
        for part in event.islands
        if part.island == island
    )
