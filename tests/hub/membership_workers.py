"""What workers do in the model of `membership_model`: their connection, and the collectives of their generation.

The one idea: a collective may complete at a member once all members have contributed; whether and when it does is free.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from tests.hub.membership_values import (
    CLOSED,
    Bounds,
    Group,
    Move,
    Node,
    Process,
    Violation,
    Weak,
    put,
    slot_of,
)

from ragtag.core.ledger import Ledger
from ragtag.hub import worker_rules
from ragtag.hub.frames import Checkpointed, End, Fail, Go, Hello, Leave, Member, Prep, Ready, Started


class Workers:
    """Moves of the workers."""

    def __init__(self, bounds: Bounds, weak: Weak) -> None:
        self.bounds, self.weak = bounds, weak
        self.slots = bounds.workers + bounds.newcomers
        self.units = bounds.workers
        self._told: dict[tuple, tuple] = {}
        self._shared: dict[tuple, tuple[int, ...]] = {}
        self._generations: dict[str, int] = {}

    def hello(self, process: Process) -> Hello:
        inc = process.me.inc
        first = slot_of(inc) < self.bounds.workers
        host = "h" if first else inc
        member = Member(inc=inc, name=inc, host=host, address="", store_port=1, local_rank=slot_of(inc))
        return Hello(
            run="r",
            version="0",
            member=member,
            generation=process.me.seen,
            has_state=process.me.has_state,
            expected=self.bounds.workers if first else 1,
        )

    def connect(self, node: Node, slot: int, process: Process) -> Node:
        process = process._replace(linked=True)
        # A connection that the hub does not know to be over is replaced; what was under way on it is lost.
        before = node.up[slot] if CLOSED in node.up[slot] else ()
        return node._replace(
            processes=put(node.processes, slot, process),
            up=put(node.up, slot, (*before, self.hello(process))),
            down=put(node.down, slot, ()),
        )

    # A worker

    def worker_moves(self, node: Node, slot: int, process: Process) -> Iterator[Move]:
        me, world = process.me, node.world
        inc = me.inc
        if not process.linked:
            yield "sys", ("connect", inc), self.connect(node, slot, process)
        elif node.down[slot]:
            frame, *rest = node.down[slot]
            after = node._replace(down=put(node.down, slot, tuple(rest)))
            yield "sys", ("read", inc, frame), self.hears(after, slot, process, frame)
        if world.crash:
            after = node._replace(world=world._replace(crash=world.crash - 1))
            yield from self.broken(after, slot, process._replace(alive=False), ("crash", inc))
        if world.cut and process.linked and CLOSED not in node.down[slot]:
            after = node._replace(world=world._replace(cut=world.cut - 1))
            yield from self.broken(after, slot, process, ("cut", inc))
            lost = after._replace(
                processes=put(node.processes, slot, process._replace(linked=False)), up=put(node.up, slot, ())
            )
            yield "adv", ("cut, unseen by the hub", inc), lost._replace(down=put(node.down, slot, ()))
        if me.group:
            group = next(group for group in node.groups if group.generation == me.group)
            yield from self.collective_moves(node, slot, process, group, group.members.index(inc))

    def broken(self, node: Node, slot: int, process: Process, label: tuple) -> Iterator[Move]:
        """A connection ends; what was under way in either direction arrives, or does not."""
        ups = {node.up[slot]}
        if process.linked or CLOSED not in node.up[slot]:
            ups = {(*node.up[slot], CLOSED), (CLOSED,)}
        downs = {(*node.down[slot], CLOSED), (CLOSED,)} if process.alive else {()}
        for up, down in sorted(product(ups, downs), key=lambda pair: (len(pair[0]), len(pair[1]))):
            after = self.set(node, slot, process)
            after = after._replace(up=put(node.up, slot, up), down=put(node.down, slot, down))
            yield "adv", (*label, f"{len(up) - 1} frames arrive"), after

    def say(self, node: Node, slot: int, *frames: Any) -> Node:
        process = node.processes[slot]
        assert process is not None
        if not process.linked or CLOSED in node.down[slot]:
            return node  # on a broken connection
        return node._replace(up=put(node.up, slot, (*node.up[slot], *frames)))

    def set(self, node: Node, slot: int, process: Process) -> Node:
        return node._replace(processes=put(node.processes, slot, process))

    def hears(self, node: Node, slot: int, process: Process, frame: Any) -> Node:
        me = process.me
        if frame == CLOSED:
            return self.set(node, slot, process._replace(linked=False))
        if isinstance(frame, End):
            return self.gone(node, slot, process)
        if isinstance(frame, Started):
            return self.set(node, slot, process._replace(me=worker_rules.on_started(me, frame)))
        if isinstance(frame, Prep):
            me, told = self.told(worker_rules.on_prep, me, frame)
            node = self.set(node, slot, process._replace(me=me))
            return self.say(node, slot, told.join) if told.do == "join" else node
        assert isinstance(frame, Go)
        try:
            me, told = self.told(worker_rules.on_go, me, frame)
        except AssertionError as error:
            raise Violation(f"I2: {error}") from error
        process = process._replace(me=me)
        if told.do in ("ignore", "wait"):
            return self.set(node, slot, process)
        if told.do == "evicted":
            return self.gone(node, slot, process)
        if told.do == "apply":
            node, process = self.applies(node, process)
        if told.do in ("begin", "copy"):
            process = process._replace(cover=0, history=())
        return self.enters(node, slot, process, frame, told.rank)

    def told(self, function: Callable, *args: Any) -> tuple:
        key = (function.__name__, *args)
        if key not in self._told:
            self._told[key] = function(*args)
        return self._told[key]

    def gone(self, node: Node, slot: int, process: Process) -> Node:
        """The process ends."""
        node = self.set(self.say(node, slot, CLOSED), slot, process._replace(alive=False, cover=0))
        return node._replace(down=put(node.down, slot, ()))

    def applies(self, node: Node, process: Process) -> tuple[Node, Process]:
        """Apply the held step; the invariants on gradients are checked here."""
        me, log = process.me, node.world.log
        step, name = me.applied, me.held_digest
        generation = self._generations[name]
        if step < len(log):
            if log[step][0] != name:
                raise Violation(f"I1: {me.inc} applies {name} for step {step + 1}, somebody applied {log[step][0]}")
        else:
            if process.history != tuple(each for each, _ in log):
                raise Violation(f"I3: {me.inc} applies step {step + 1} to parameters that lack steps")
            if log and log[-1][1] > generation:
                raise Violation(f"I5: generation {generation} goes on while {log[-1][1]} does")
            node = node._replace(world=node.world._replace(log=(*log, (name, generation))))
        history = (*process.history, name)
        if history != tuple(each for each, _ in node.world.log[: step + 1]):
            raise Violation(f"I3: {me.inc} has applied {history}")
        return node, process._replace(me=worker_rules.apply_held(me), cover=0, history=history)

    # Inside a generation

    def enters(self, node: Node, slot: int, process: Process, go: Go, rank: int) -> Node:
        members = tuple(member.inc for member in go.members)
        nobody = (None,) * len(members)
        group = next((group for group in node.groups if group.generation == go.generation), None)
        if group is None:
            group = Group(
                generation=go.generation,
                members=members,
                num_veterans=go.num_veterans,
                base=go.base,
                posted=nobody,
                source=None,
                copied=tuple(each < go.num_veterans for each in range(len(members))),
                sums=(nobody,) * self.bounds.steps,
                votes=(("",) * len(members),) * self.bounds.steps,
            )
            node = node._replace(groups=tuple(sorted((*node.groups, group))))
        group = group._replace(posted=put(group.posted, rank, process.cover))
        if rank == 0:
            group = group._replace(source=process.history)
        node = self.set(self.regrouped(node, group), slot, process)
        if rank == 0 and go.action == "start":
            return self.has_copied(node, slot, process, group, rank)
        return node

    def regrouped(self, node: Node, group: Group) -> Node:
        return node._replace(
            groups=tuple(group if each.generation == group.generation else each for each in node.groups)
        )

    def has_copied(self, node: Node, slot: int, process: Process, group: Group, rank: int) -> Node:
        assert group.source is not None
        history = group.source
        me = worker_rules.copied(process.me, len(history), history[-1] if history else "")
        node = self.set(node, slot, process._replace(me=me, history=history))
        node = self.regrouped(node, group._replace(copied=put(group.copied, rank, True)))
        return self.say(node, slot, Ready(generation=group.generation, inc=me.inc))

    def collective_moves(self, node: Node, slot: int, process: Process, group: Group, rank: int) -> Iterator[Move]:
        me, inc, step = process.me, process.me.inc, process.me.applied
        world = node.world

        def fails(kind: str, label: str, after: Node) -> Move:
            left = self.set(after, slot, process._replace(me=worker_rules.on_failure(me)))
            fail = Fail(generation=group.generation, inc=inc, reason="")
            return kind, (label, inc, group.generation), self.say(left, slot, fail)

        if any(self.is_gone(node, group, other) for other in range(len(group.members)) if other != rank):
            yield fails("sys", "fails", node)
        elif world.glitch:
            yield fails("adv", "link fails", node._replace(world=world._replace(glitch=world.glitch - 1)))
        if not me.has_state:
            if group.source is not None:
                yield "sys", ("copy", inc, group.generation), self.has_copied(node, slot, process, group, rank)
            return
        if world.checkpoint and rank == 0 and step:
            after = node._replace(world=world._replace(checkpoint=world.checkpoint - 1))
            frame = Checkpointed(generation=group.generation, inc=inc, step=step, name=process.history[-1])
            yield "adv", ("checkpoint", inc, step), self.say(after, slot, frame)
        if step == self.bounds.steps:
            if all(group.copied):
                yield "sys", ("leave", inc), self.leaves(node, slot, process)
            return
        sums, votes = group.sums[step], group.votes[step]
        if sums[rank] is None:
            if step > group.base or None not in group.posted:
                cover = self.share(group, rank, step)
                given = group._replace(sums=put(group.sums, step, put(sums, rank, (cover, me.flagged > 0))))
                after = self.set(self.regrouped(node, given), slot, process._replace(cover=cover))
                yield "sys", ("contribute", inc, group.generation, step + 1, bin(cover)), after
            return
        if None in sums:
            return
        name = self.reduced(group, step)
        if me.held_digest != name:
            after = self.set(node, slot, process._replace(me=worker_rules.hold(me, name)))
            yield "sys", ("hold", inc, group.generation, step + 1), after
            return
        flagged = any(each is not None and each[1] for each in sums)
        if self.weak.applies_alone:
            yield "sys", ("apply alone", inc, step + 1), self.commits(node, slot, process, flagged=flagged)
        if not votes[rank]:
            if worker_rules.may_vote(me) or self.weak.votes_early:
                after = self.regrouped(node, group._replace(votes=put(group.votes, step, put(votes, rank, name))))
                yield "sys", ("vote", inc, group.generation, step + 1), after
            return
        if all(votes):
            if set(votes) != {name}:
                raise Violation(f"I1: unequal votes in generation {group.generation}")
            yield "sys", ("commit", inc, group.generation, step + 1), self.commits(node, slot, process, flagged=flagged)

    def commits(self, node: Node, slot: int, process: Process, *, flagged: bool) -> Node:
        node, process = self.applies(node, process)
        if flagged:
            me, told = worker_rules.at_boundary(process.me)
            node = self.set(node, slot, process._replace(me=me))
            return self.say(node, slot, told.join) if told.join is not None else node
        if process.me.applied == self.bounds.steps:
            return self.leaves(node, slot, process)
        return self.set(node, slot, process)

    def leaves(self, node: Node, slot: int, process: Process) -> Node:
        leave = Leave(generation=process.me.group, inc=process.me.inc)
        return self.gone(self.say(node, slot, leave), slot, process._replace(me=worker_rules.on_failure(process.me)))

    def is_gone(self, node: Node, group: Group, rank: int) -> bool:
        """Whether other members notice that this one will not come, or come back."""
        inc = group.members[rank]
        process = node.processes[slot_of(inc)]
        assert process is not None
        if process.me.inc != inc or not process.alive:
            return True
        return (
            process.me.group != group.generation
            and process.me.seen >= group.generation
            and (group.posted[rank] is not None or process.me.seen > group.generation)
        )

    def share(self, group: Group, rank: int, step: int) -> int:
        """Units in this rank's sum when it is complete: those it kept, and its part of what is in nobody's."""
        posted = tuple(mask or 0 for mask in group.posted) if step == group.base else (0,) * len(group.members)
        if posted not in self._shared:
            contents = [[unit for unit in range(self.units) if mask >> unit & 1] for mask in posted]
            ledger = Ledger(step=1, samples=self.units, unit=1, units_per_rank=(self.units, *(0,) * (len(posted) - 1)))
            dropped = ledger.settle(contents)
            kept = [0 if each in dropped else mask for each, mask in enumerate(posted)]
            missing = [unit for unit in range(self.units) if not any(mask >> unit & 1 for mask in kept)]
            for number, unit in enumerate(missing):
                kept[number % len(posted)] |= 1 << unit
            self._shared[posted] = tuple(kept)
        return self._shared[posted][rank]

    def reduced(self, group: Group, step: int) -> str:
        masks = [each[0] for each in group.sums[step] if each is not None]
        if sum(masks) != (1 << self.units) - 1 or sum(mask.bit_count() for mask in masks) != self.units:
            raise Violation(f"I1: units of step {step + 1} are not in exactly one sum each: {masks}")
        name = worker_rules.digest(group.generation, step + 1, sum(masks), 1.0, False)
        self._generations[name] = group.generation
        return name
