"""The hub's rules driven by a script of frames and times, with the workers' answers written by hand."""

from typing import Any, TypeVar

from ragtag.hub.frames import Beat, Fail, Frame, Go, Hello, Join, Leave, Member, Prep, Ready
from ragtag.hub.rules import advance, restore
from ragtag.hub.rules_state import (
    Closed,
    Effect,
    Journal,
    JournalRecord,
    Log,
    Received,
    Restarted,
    RunSettings,
    Send,
    Tick,
)

SETTINGS = RunSettings(run="run", version="1", patience_s=30.0)
F = TypeVar("F", bound=Frame)


def member(inc: str, host: str = "box", address: str = "10.0.0.1", **more: Any) -> Member:
    return Member(inc=inc, name=f"gpu-{inc}", host=host, address=address, store_port=1, **more)


class Script:
    """A hub; every call returns the effects, which `effects` collects too."""

    def __init__(self, records: tuple[JournalRecord, ...] = (), settings: RunSettings = SETTINGS) -> None:
        self.records = list(records)
        self.effects: list[Effect] = []
        self.now_s = 100.0
        self.state = restore(records, settings)
        self.happens(Restarted())

    def happens(self, event: Any) -> tuple[Effect, ...]:
        self.state, effects = advance(self.state, event, self.now_s)
        self.records += [effect.record for effect in effects if isinstance(effect, Journal)]
        self.effects += effects
        return effects

    def frame(self, inc: str, frame: Any) -> tuple[Effect, ...]:
        return self.happens(Received(inc=inc, frame=frame))

    def hello(self, inc: str, *, generation: int = 0, has_state: bool = False, expected: int = 1, **more: Any):
        hello = Hello(
            run=more.pop("run", "run"),
            version=more.pop("version", "1"),
            member=member(inc, **more),
            generation=generation,
            has_state=has_state,
            expected=expected,
        )
        return self.frame(inc, hello)

    def join(self, inc: str, **more: Any) -> tuple[Effect, ...]:
        assert self.state.preparing is not None
        more = {"has_state": True, **more}
        return self.frame(inc, Join(generation=self.state.preparing.generation, inc=inc, **more))

    def fail(self, inc: str, suspect: str = "") -> tuple[Effect, ...]:
        assert self.state.go is not None
        return self.frame(inc, Fail(generation=self.state.go.generation, inc=inc, reason="broken", suspect=suspect))

    def beat(self, inc: str, doing: str = "forward and backward", doing_s: float = 0.0, **more: Any):
        now = {"generation": self.state.go.generation if self.state.go else 0, "step": 1}
        return self.frame(inc, Beat(**{**now, **more}, inc=inc, doing=doing, doing_s=doing_s))

    def leave(self, inc: str) -> tuple[Effect, ...]:
        return self.frame(inc, Leave(generation=0, inc=inc))

    def closed(self, inc: str) -> tuple[Effect, ...]:
        return self.happens(Closed(inc=inc))

    def passes(self, seconds: float, beating: str = "", **doing: Any) -> tuple[Effect, ...]:
        """Let time pass, a second at a time, with heartbeats of those in `beating`."""
        effects: tuple[Effect, ...] = ()
        for _ in range(round(seconds)):
            self.now_s += 1
            for inc in beating:
                effects += self.beat(inc, **doing)
            effects += self.happens(Tick())
        return effects

    def trained(self, incs: str) -> "Script":
        """A first generation of these, started."""
        for inc in incs:
            self.hello(inc, expected=len(incs), local_rank=incs.index(inc))
        for inc in incs:
            self.join(inc, has_state=False)
        for inc in incs:
            self.frame(inc, Ready(generation=self.go.generation, inc=inc))
        self.effects.clear()
        return self

    @property
    def go(self) -> Go:
        assert self.state.go is not None
        return self.state.go

    @property
    def prep(self) -> Prep:
        """The last announcement sent to anybody."""
        return self.sent(Prep)[-1][1]

    def sent(self, kind: type[F], effects: tuple[Effect, ...] | None = None) -> list[tuple[str, F]]:
        chosen = self.effects if effects is None else effects
        return [(each.inc, each.frame) for each in chosen if isinstance(each, Send) and isinstance(each.frame, kind)]

    @property
    def warnings(self) -> str:
        return "\n".join(each.text for each in self.effects if isinstance(each, Log) and each.level == "warning")


def incs(go: Go) -> str:
    return "".join(each.inc for each in go.members)
