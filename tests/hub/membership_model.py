"""The protocol as a transition system for exhaustive search: real rules for hub and workers, abstract data and time.

The one idea: what decides (`rules.advance`, `worker_rules`) is the code that runs in production; only what carries is
modelled. A collective is a set of contributions, a connection two queues, a delay a reader that acts late, a frozen
worker one that is not scheduled, and the clock stands still except where a test of patience is let loose.

`sys` moves are promised, `adv` moves are the adversary's, each with its budget. A state without a `sys` move in which
somebody still waits is stuck.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from msgspec.structs import replace
from tests.hub.membership_values import (
    CLOSED,
    FAITHFUL,
    LONG_AGO_S,
    NAMES,
    PATIENCE_S,
    SETTINGS,
    Bounds,
    Move,
    Node,
    Process,
    Violation,
    Weak,
    World,
    canonical,
    compact,
    plain,
    put,
    slot_of,
)
from tests.hub.membership_workers import Workers

from ragtag.hub import rules
from ragtag.hub.frames import Go, Hello
from ragtag.hub.rules_state import (
    CloseConnection,
    Closed,
    EndRecord,
    GoRecord,
    HubState,
    Journal,
    PointerRecord,
    Received,
    Restarted,
    Send,
    Tick,
)
from ragtag.hub.worker_rules import WorkerState


class Model(Workers):
    """Initial state and successors."""

    def __init__(self, bounds: Bounds, weak: Weak = FAITHFUL) -> None:
        super().__init__(bounds, weak)
        self._advanced: dict[tuple, tuple] = {}
        self._hubs: dict[HubState, HubState] = {}
        self._identities: set[int] = set()

    # Beginning

    def initial(self) -> Node:
        b = self.bounds
        hub, effects = rules.advance(rules.restore((), SETTINGS), Restarted(), 0.0)
        journal = tuple(effect.record for effect in effects if isinstance(effect, Journal))
        processes = tuple(
            Process(WorkerState(inc=f"{NAMES[slot]}0")) if slot < b.workers else None for slot in range(self.slots)
        )
        up = tuple((self.hello(each),) if each else () for each in processes)
        budgets = World(b.crash, b.suspect, b.glitch, b.cut, b.hub, b.rejoin, b.checkpoint, b.newcomers)
        node = Node(canonical(hub), journal, budgets, (), processes, up, ((),) * self.slots)
        return node if b.cold else self.warmed(node)

    def warmed(self, node: Node) -> Node:
        """Let the first generation form without trouble."""
        while not (node.hub.started and not any(node.up) and not any(node.down)):
            quiet = node._replace(world=World(*(0,) * 8))
            moves = [move for move in self.successors(quiet) if move[1][0] in ("read", "hub", "copy")]
            node = moves[0][2]._replace(world=node.world)
        return node

    # Successors

    def successors(self, node: Node) -> Iterator[Move]:
        for slot, process in enumerate(node.processes):
            if process is not None and process.alive:
                yield from self.worker_moves(node, slot, process)
            elif process is None and node.world.newcomers:
                new = Process(WorkerState(inc=f"{NAMES[slot]}0"))
                world = node.world._replace(newcomers=node.world.newcomers - 1)
                yield "adv", ("arrive", new.me.inc), self.connect(node._replace(world=world), slot, new)
            elif process is not None and node.world.rejoin:
                inc = f"{process.me.inc[0]}{int(process.me.inc[1:]) + 1}"
                new = Process(WorkerState(inc=inc))
                world = node.world._replace(rejoin=node.world.rejoin - 1)
                yield "adv", ("rejoin", inc), self.connect(node._replace(world=world), slot, new)
        for slot, queue in enumerate(node.up):
            if queue:
                yield from self.hub_reads(node, slot, queue)
        yield from self.hub_waits(node)
        if node.world.hub:
            world = node.world._replace(hub=node.world.hub - 1)
            yield from self.restarted(node._replace(world=world))

    # The hub

    def hub_reads(self, node: Node, slot: int, queue: tuple) -> Iterator[Move]:
        first, *rest = queue
        process = node.processes[slot]
        assert process is not None
        if isinstance(first, Hello):
            inc = first.member.inc
        elif first == CLOSED:
            here = [worker.inc for worker in node.hub.workers if worker.connected and slot_of(worker.inc) == slot]
            inc = here[0] if here else ""
        else:
            inc = first.inc
        event = Closed(inc=inc) if first == CLOSED else Received(inc=inc, frame=first)
        after = node._replace(up=put(node.up, slot, tuple(rest)))
        yield from self.hub_acts(after, event, ("hub", inc, first))

    def hub_waits(self, node: Node) -> Iterator[Move]:
        """Tests of patience: the clock jumps for one worker, or for one generation that forms."""
        hub, world = node.hub, node.world
        if hub.end is not None:
            return
        preparing = hub.preparing
        inside = {*hub.members, *(() if preparing is None else preparing.members)}
        for worker in hub.workers if world.suspect else ():
            if worker.inc in inside and worker.connected and self.lives(node, worker.inc):
                silent = self.with_worker(hub, worker.inc, heard_s=LONG_AGO_S)
                after = node._replace(hub=silent, world=world._replace(suspect=world.suspect - 1))
                yield from self.hub_acts(after, Tick(), ("silent", worker.inc), kind="adv")
        if preparing is not None:
            missing = set(preparing.members) - {join.inc for join in preparing.joins}
            living = {inc for inc in missing if self.lives(node, inc)}
            away = {worker.inc for worker in hub.workers if not worker.connected}
            late = hub
            for inc in living - away:
                late = self.with_worker(late, inc, doing="your code")
            if missing - living and not living & away:
                overdue = replace(late, preparing=replace(preparing, since_s=-2 * PATIENCE_S))
                yield from self.hub_acts(node._replace(hub=overdue), Tick(), ("overdue", *sorted(missing - living)))
            if living and world.suspect >= len(living):
                overdue = replace(hub, preparing=replace(preparing, since_s=-2 * PATIENCE_S))
                after = node._replace(hub=overdue, world=world._replace(suspect=world.suspect - len(living)))
                yield from self.hub_acts(after, Tick(), ("overdue", *sorted(missing)), kind="adv")
        elif not hub.started:
            here = {worker.inc for worker in hub.workers}
            if not any(each and each.alive and each.me.inc not in here for each in node.processes):
                tired = node._replace(hub=replace(hub, arrived_s=LONG_AGO_S))
                yield from self.hub_acts(tired, Tick(), ("begins without some",))

    def lives(self, node: Node, inc: str) -> bool:
        process = node.processes[slot_of(inc)]
        return process is not None and process.alive and process.me.inc == inc

    def with_worker(self, hub: HubState, inc: str, **changes: Any) -> HubState:
        return replace(
            hub, workers=tuple(replace(each, **changes) if each.inc == inc else each for each in hub.workers)
        )

    def hub_acts(self, node: Node, event: Any, label: tuple, kind: str = "sys") -> Iterator[Move]:
        hub, effects = self.advanced(node.hub, event)
        self.check_chance(node, hub)
        after = self.done(node._replace(hub=hub), effects)
        if after != node or event != Tick():
            yield kind, label, after
        if node.world.hub and len(effects) > 1:
            for count in range(1, len(effects)):
                half = self.done(node, effects[:count])
                half = half._replace(world=half.world._replace(hub=half.world.hub - 1))
                yield from self.restarted(half, f"after {count} of {len(effects)} effects", *label)

    def advanced(self, hub: HubState, event: Any) -> tuple[HubState, tuple]:
        # States that come from here are unique objects, which stay: their identity is enough, and quick.
        known = self._hubs.setdefault(hub, hub) if id(hub) not in self._identities else hub
        self._identities.add(id(known))
        key = (id(known), event)
        if key not in self._advanced:
            after, effects = rules.advance(hub, event, 0.0)
            wanted = [plain(each) for each in effects if isinstance(each, Journal | Send | CloseConnection)]
            wanted = [each for each in wanted if each is not None]
            if self.weak.journal_last:
                wanted.sort(key=lambda each: isinstance(each, Journal))
            after = canonical(after)
            after = self._hubs.setdefault(after, after)
            self._identities.add(id(after))
            self._advanced[key] = after, tuple(wanted)
        return self._advanced[key]

    def done(self, node: Node, effects: tuple) -> Node:
        for effect in effects:
            if isinstance(effect, Journal):
                self.check_record(node, effect.record)
                node = node._replace(journal=compact((*node.journal, effect.record)))
                continue
            slot = slot_of(effect.inc)
            process = node.processes[slot]
            assert process is not None
            if process.me.inc != effect.inc or not process.alive or not process.linked or CLOSED in node.down[slot]:
                continue
            frame = CLOSED if isinstance(effect, CloseConnection) else effect.frame
            node = node._replace(down=put(node.down, slot, (*node.down[slot], frame)))
        return node

    def check_record(self, node: Node, record: Any) -> None:
        log = node.world.log
        if isinstance(record, PointerRecord):
            before = max((each.step for each in node.journal if isinstance(each, PointerRecord)), default=0)
            if record.step <= before or record.name != log[record.step - 1][0]:
                raise Violation(f"I4: the pointer moves from step {before} to {record}, others applied {log}")
        if isinstance(record, GoRecord) and record.go.action == "start" and log:
            raise Violation(f"I3: the run starts again although {log} was applied")
        if isinstance(record, EndRecord) and record.end.failed:
            if "drifted" in record.end.reason:
                raise Violation(f"I1: {record.end.reason}")
            b, world = self.bounds, node.world
            alive = [each for each in node.processes if each and each.alive and each.me.has_state]
            if alive and (world.suspect, world.cut) == (b.suspect, b.cut):
                raise Violation(f"I2: the run ends ({record.end.reason}) although {alive[0].me.inc} has the state")

    def check_chance(self, before: Node, hub: HubState) -> None:
        """Where all were lost at once, whoever comes back waits for the others."""
        preparing = before.hub.preparing
        if preparing is None or not preparing.last_chance or before.world.suspect != self.bounds.suspect:
            return
        for worker in hub.workers:
            if worker.suspicion and worker.inc in preparing.members and self.lives(before, worker.inc):
                raise Violation(f"I6: {worker.inc} is given up, although nobody's patience has ended")

    def restarted(self, node: Node, *when: Any) -> Iterator[Move]:
        """The hub's process is replaced: what is under way is lost or not, in every combination."""
        hub, effects = rules.advance(rules.restore(node.journal, SETTINGS), Restarted(), 0.0)
        node = node._replace(hub=canonical(hub), up=((),) * self.slots)
        node = node._replace(
            journal=compact((*node.journal, *(each.record for each in effects if isinstance(each, Journal))))
        )
        choices = []
        for slot, process in enumerate(node.processes):
            queue = node.down[slot]
            if process is None or not process.alive or not process.linked:
                choices.append([queue])
            elif CLOSED in queue or not queue:
                choices.append([queue if CLOSED in queue else (CLOSED,)])
            else:
                choices.append([(*queue, CLOSED), (CLOSED,)])
        for number, down in enumerate(product(*choices)):
            yield "adv", ("hub dies", number, *when), node._replace(down=tuple(down))

    # Ends

    def finished(self, node: Node) -> bool:
        """Whether nobody waits for anything."""
        return not any(each and each.alive for each in node.processes)

    def tidy(self, node: Node) -> Node:
        """Forget collectives that nobody is in or can enter any more."""
        wanted = {each.me.group for each in node.processes if each and each.alive}
        wanted |= {frame.generation for queue in node.down for frame in queue if isinstance(frame, Go)}
        newest = node.hub.go.generation if node.hub.go is not None else 0
        kept = tuple(group for group in node.groups if group.generation in wanted or group.generation >= newest)
        return node if kept == node.groups else node._replace(groups=kept)
