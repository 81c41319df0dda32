"""What is known of islands that train side by side, after any number of events.

The one idea: totals by island, the newest tempo with its reason, and the last words about each; nothing grows with the
number of rounds.
"""

from collections import deque
from dataclasses import dataclass, field

from ragtag.watch.events import Exchanged, Guarded, IslandChanged, Retuned

_KEPT = 50
_KEPT_ISLANDS = 500


@dataclass(slots=True)
class Island:
    """One site."""

    name: str
    fragments: int = 0
    """Contributions that were merged."""
    sent_bytes: int = 0
    plain_bytes: int = 0
    """What they would have taken in fp32."""
    age_sum: int = 0
    late: int = 0
    """Contributions that came a round or more late."""
    weight_sum: float = 0.0
    refused: int = 0
    state: str = ""
    text: str = ""
    """The last words about it."""
    guard: Guarded | None = None
    """Its newest reading."""

    @property
    def compression(self) -> float:
        """How many times fewer bytes were sent than fp32 takes; 0: nothing was sent."""
        return self.plain_bytes / self.sent_bytes if self.sent_bytes else 0.0

    @property
    def staleness(self) -> float:
        """Mean rounds that its contributions were late."""
        return self.age_sum / self.fragments if self.fragments else 0.0

    @property
    def weight(self) -> float:
        """Its mean part of the merges it was in."""
        return self.weight_sum / self.fragments if self.fragments else 0.0


@dataclass(slots=True)
class IslandsState:
    """Call `apply` with each event of these kinds, in order."""

    islands: dict[str, Island] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    """By fragment, merges so far."""
    tempo: Retuned | None = None
    newest: Exchanged | None = None
    actions: deque[Guarded] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """What the guard has done."""
    words: deque[IslandChanged] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def apply(self, event: Exchanged | IslandChanged | Retuned | Guarded) -> None:
        """Take an event into account."""
        if isinstance(event, Retuned):
            self.tempo = event
        elif isinstance(event, Guarded):
            self._of(event.island).guard = event
            if event.action:
                self.actions.append(event)
        elif isinstance(event, IslandChanged):
            island = self._of(event.island)
            island.text = event.text
            if event.change == "refused":
                island.refused += 1
            else:
                island.state = event.change
            self.words.append(event)
        else:
            self._merged(event)

    def _merged(self, event: Exchanged) -> None:
        self.newest = event
        self.rounds[event.fragment] = self.rounds.get(event.fragment, 0) + 1
        for each in event.islands:
            island = self._of(each.island)
            island.fragments += 1
            island.sent_bytes += each.sent_bytes
            island.plain_bytes += each.plain_bytes
            island.age_sum += each.age
            island.late += each.age > 0
            island.weight_sum += each.weight

    def _of(self, name: str) -> Island:
        if name not in self.islands and len(self.islands) >= _KEPT_ISLANDS:
            del self.islands[next(iter(self.islands))]
        return self.islands.setdefault(name, Island(name=name))
