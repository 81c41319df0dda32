"""Breadth-first search over all interleavings of `membership_model`, so that a counterexample is a shortest one.

The one idea: states are tuples of numbers; each part of a state is stored once.
"""

from typing import NamedTuple

from tests.hub.membership_model import Model
from tests.hub.membership_values import Node, Violation


class Result(NamedTuple):
    """What a search found."""

    states: int
    moves: int
    violation: str
    trace: tuple[str, ...]
    seen: frozenset[str]
    """Kinds of moves."""
    complete: bool


class _Store:
    def __init__(self) -> None:
        self.parts: list = []
        self._numbers: dict = {}
        self._by_identity: dict[int, int] = {}

    def number(self, part: object) -> int:
        # Most parts of a node come from here, and all that is here stays: identity is enough, and quick.
        found = self._by_identity.get(id(part))
        if found is not None:
            return found
        found = self._numbers.get(part)
        if found is None:
            found = self._numbers[part] = self._by_identity[id(part)] = len(self.parts)
            self.parts.append(part)
        return found

    def pack(self, node: Node) -> tuple[int, ...]:
        n = self.number
        return (
            n(node.hub),
            n(node.journal),
            n(node.world),
            n(node.groups),
            *map(n, node.processes),
            *map(n, node.up),
            *map(n, node.down),
        )

    def unpack(self, state: tuple[int, ...]) -> Node:
        hub, journal, world, groups, *rest = (self.parts[number] for number in state)
        third = len(rest) // 3
        return Node(
            hub, journal, world, groups, tuple(rest[:third]), tuple(rest[third : 2 * third]), tuple(rest[2 * third :])
        )


def search(model: Model, limit: int = 10_000_000) -> Result:
    """Return the first violation, or none; gives up, incomplete, after `limit` states."""
    store = _Store()
    first = store.pack(model.tidy(model.initial()))
    parents: dict[tuple, tuple | None] = {first: None}
    level, moves, seen = [first], 0, set()

    def result(violation: str = "", state: tuple | None = None, last: str = "", complete: bool = True) -> Result:
        steps = [last] if last else []
        while state is not None and parents[state] is not None:
            before = parents[state]
            assert before is not None
            steps.append(
                next(
                    str(label)
                    for _, label, after in model.successors(store.unpack(before))
                    if store.pack(model.tidy(after)) == state
                )
            )
            state = before
        trace = tuple(reversed(steps)) if violation else ()
        return Result(len(parents), moves, violation, trace, frozenset(seen), complete)

    while level:
        following = []
        for state in level:
            node = store.unpack(state)
            promised = False
            try:
                for kind, label, after in model.successors(node):
                    moves += 1
                    promised = promised or kind == "sys"
                    seen.add(str(label[0]))
                    packed = store.pack(model.tidy(after))
                    if packed not in parents:
                        parents[packed] = state
                        following.append(packed)
            except Violation as broken:
                return result(str(broken), state, "then")
            if not promised and not model.finished(node):
                return result(f"I2: stuck: {node}", state)
        if len(parents) > limit:
            return result(complete=False)
        level = following
    return result()
