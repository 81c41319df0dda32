"""The emulated clusters that `scripts/bench eta` measures, with what is expected of each.

The one idea: a case is a value. *Blocks* compare ways to train under speeds that stay; a *script* follows one device
through a change, step by step.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Script:
    """Steps of a run that is watched step by step; each round starts it anew."""

    steps: int
    first: int
    """eta is over steps `first` .. `steps`."""
    stride: int = 1
    """Every so many of these steps the devices are measured alone."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One emulated cluster."""

    what: str
    speeds: tuple[float, ...]
    batch: int
    by_hand: tuple[int, ...]
    """Shares that somebody who knows the speeds would set."""
    target: float
    compared: str = "eta"
    """What the target is of: ragtag's eta, or its speed relative to another way."""
    steps: int = 8
    """Steps of a block."""
    warm_up: int = 12
    """Steps before, in which shares find their place; ragtag tries pulling for 12 steps with it and 12 without."""
    emulate: str = "sample_ms = 40"
    devices: tuple[str, ...] = ()
    """Further TOML, by device."""
    micro_batch: int | None = None
    """Samples of a micro-batch, of every way alike; None: the whole share."""
    against: tuple[str, ...] = ()
    """Further ways of ragtag: "planned" (nothing is pulled), "pulled" (whatever is predicted)."""
    pinned: tuple[int, ...] = ()
    """Shares of a further way of ragtag, "pinned": what would be wrong, or right but set by hand."""
    ddp: bool = True
    """Whether DDP is measured too."""
    equal_steps: int = 0
    """Steps of a block with equal batches, which take longest; 0: as many."""
    script: Script | None = None

    def toml(self) -> str:
        """The case as a cluster file."""
        parts = ["[emulate]", self.emulate]
        for number, speed in enumerate(self.speeds):
            parts += ["[[device]]", f'name = "device{number}"', f"speed = {speed}"]
            parts += self.devices[number : number + 1]
        return "\n".join([*parts, ""])


_FOUR = {"speeds": (1, 1, 0.5, 0.25), "batch": 44, "by_hand": (16, 16, 8, 4)}
_JITTER = 'sample_ms = 40\njitter = 0.3\njitter_per = "{}"'
_STALL = "stall = [{step = 15, seconds = 2}]"
CASES = {
    "quarter": Case(what="speeds 1, 1, 1/4", speeds=(1, 1, 0.25), batch=18, by_hand=(8, 8, 2), target=0.95, steps=12),
    "four": Case(what="speeds 1, 1, 0.5, 0.25", **_FOUR, target=0.95, equal_steps=3),
    "tenth": Case(
        what="speeds 1, 1, 0.1", speeds=(1, 1, 0.1), batch=42, by_hand=(20, 20, 2), target=0.93, equal_steps=2
    ),
    "equal": Case(
        what="speeds 1, 1, 1",
        speeds=(1, 1, 1),
        batch=24,
        by_hand=(8, 8, 8),
        target=0.98,
        compared="ddp_equal",
        steps=12,
    ),
    "quota": Case(
        what="CPU quotas of 60, 60, 15 %",
        speeds=(1, 1, 1),
        batch=72,
        by_hand=(32, 32, 8),
        target=0.85,
        steps=10,
        warm_up=40,
        emulate="",
        devices=("cpu_percent = 60", "cpu_percent = 60", "cpu_percent = 15"),
        equal_steps=3,
    ),
    "jitter-step": Case(
        what="30 % log-normal a step",
        **_FOUR,
        target=0.90,
        steps=10,
        warm_up=40,
        emulate=_JITTER.format("step"),
        against=("planned",),
        equal_steps=2,
    ),
    "jitter-micro": Case(
        what="30 % log-normal a micro-batch",
        **_FOUR,
        target=1.03,
        compared="ragtag_planned",
        steps=10,
        warm_up=40,
        emulate=_JITTER.format("micro_batch").replace("40", "80"),
        micro_batch=1,
        against=("planned",),
        equal_steps=2,
    ),
    "pull-cost": Case(
        what="no jitter, work pulled all the same",
        **_FOUR,
        target=0.99,
        compared="ragtag_planned",
        against=("planned", "pulled"),
        equal_steps=1,
    ),
    "slide": Case(
        what="device 0 slides to 60 % in 50 steps",
        **_FOUR,
        target=0.92,
        devices=("drift = [{step = 12, speed = 1}, {step = 62, speed = 0.6}]",),
        script=Script(steps=72, first=13, stride=4),
    ),
    "shared": Case(
        what="half of device 0 is taken for 20 steps",
        **_FOUR,
        target=0.92,
        devices=('drift = [{step = 21, speed = 0.5}, {step = 41, speed = 1}]\ndrift_kind = "step"',),
        script=Script(steps=60, first=13, stride=2),
    ),
    "flip": Case(
        what="device 0 flips between 1 and 0.5 every 5 steps",
        **_FOUR,
        target=0.83,
        devices=("flip = {period = 5, speed = 0.5}",),
        script=Script(steps=70, first=11, stride=3),
    ),
    "slower": Case(
        what="device 0 falls to a quarter; 5 steps later",
        **_FOUR,
        target=0.93,
        devices=('drift = [{step = 16, speed = 0.25}]\ndrift_kind = "step"',),
        script=Script(steps=30, first=21, stride=2),
    ),
    "faster": Case(
        what="device 0 rises from a quarter to 1; 5 steps later",
        **{**_FOUR, "speeds": (0.25, 1, 0.5, 0.25), "by_hand": (8, 20, 10, 6)},
        target=0.93,
        devices=('drift = [{step = 16, speed = 1}]\ndrift_kind = "step"',),
        script=Script(steps=30, first=21, stride=2),
    ),
    "stall-slow": Case(
        what="device 3 stalls for 2 s before its first micro-batch",
        **_FOUR,
        target=1.5,
        compared="stall",
        devices=("", "", "", _STALL),
        script=Script(steps=24, first=9, stride=4),
    ),
    "stall-fast": Case(
        what="device 0 stalls for 2 s before its first micro-batch",
        **_FOUR,
        target=1.5,
        compared="stall",
        devices=(_STALL,),
        script=Script(steps=24, first=9, stride=4),
    ),
    "park": Case(
        what="a device that needs 1.6 s for one sample, against giving it one",
        speeds=(1, 1, 0.025),
        batch=12,
        by_hand=(6, 5, 1),
        target=1.0,
        compared="ragtag_pinned",
        pinned=(6, 5, 1),
        ddp=False,
        steps=20,
    ),
    "keep": Case(
        what="a device of an eighth, against leaving it out",
        speeds=(1, 1, 0.125),
        batch=44,
        by_hand=(21, 20, 3),
        target=1.0,
        compared="ragtag_pinned",
        pinned=(22, 22, 0),
        ddp=False,
    ),
    "quarter-optimizer": Case(
        what="1, 1, 1/4, optimizer at device speed",
        speeds=(1, 1, 0.25),
        batch=18,
        by_hand=(8, 8, 2),
        target=0.95,
        steps=12,
        emulate="sample_ms = 40\noptimizer_ms = 22",
    ),
    "four-optimizer": Case(
        what="1, 1, 0.5, 0.25, optimizer likewise",
        **_FOUR,
        target=0.95,
        emulate="sample_ms = 40\noptimizer_ms = 22",
        equal_steps=3,
    ),
}
