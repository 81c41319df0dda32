"""The events of a run: the schema of its log, one JSON object a line.

The one idea: whatever a view shows was worked out once, by the run itself, and is in the log. Terminal, page, report
and sinks only draw it, so they cannot disagree with each other or with what the controller acted on.

Every line has `kind`, which names the class below, and `t`, when it was written. Fields that have their default are
left out. Readers skip kinds and fields they do not know, so both may be added without a new version; `Began.schema`
counts what cannot be read so. Tuples "by rank" are in the order of the newest `Members`. A number that is nan or
infinite is null.
"""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

SCHEMA = 1

Cause: TypeAlias = Literal["compute", "data", "link", "memory", "host"]
"""Why a rank is slow: its device, its loader, its connection, too little memory, or other work on its processors."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """What happened at one time."""

    t: float = 0.0
    """Seconds since 1970 on the clock of the machine that wrote it."""


class Began(Event, tag="began", frozen=True, kw_only=True):
    """The run begins, or goes on from a checkpoint; the first line of each file of a log too."""

    schema: int = SCHEMA
    run: str = ""
    """The run's name, the same after it was resumed."""
    script: str = ""
    version: str = ""
    torch: str = ""
    step: int = 0
    """Steps that were committed before."""
    global_batch_size: int = 0
    parameters: int = 0
    """Numbers that are trained."""
    settings: Mapping[str, str | int | float | bool | None] = {}
    continued: bool = False
    """The log goes on in a new file; nothing began."""


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's device."""

    name: str
    """Unique in the run, and the same as long as the process lives: "desk/0", "rtx3090"."""
    host: str = ""
    device: str = ""
    """As torch spells it: "cuda:0", "cpu"."""
    model: str = ""
    """The hardware's own name."""
    memory_bytes: int = 0
    """What it has in all; 0: not known."""


class Left(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank that is no longer there."""

    name: str
    host: str = ""
    reason: str = ""


class Members(Event, tag="members", frozen=True, kw_only=True):
    """Who trains from step `step` + 1 on, by rank."""

    step: int
    generation: int = 0
    ranks: tuple[Member, ...]
    joined: tuple[str, ...] = ()
    left: tuple[Left, ...] = ()


class Planned(Event, tag="plan", frozen=True, kw_only=True):
    """The plan from step `step` + 1 on."""

    step: int
    id: str
    shares: tuple[int, ...]
    micro_batch: tuple[int, ...]
    unit: int = 1
    pulled: tuple[int, ...] = ()
    reason: str = ""
    predicted_step_s: float = 0.0
    """0: nothing is known to predict it from."""


class Looped(Event, tag="steps", frozen=True, kw_only=True):
    """The script has called `Trainer.steps`."""

    step: int
    """Steps that were committed before."""
    last: int
    """The step after which the call ends."""


class Step(Event, tag="step", frozen=True, kw_only=True):
    """One committed step; see `ragtag.StepReport`. Tuples are by rank, times in seconds.

    A rank's step is `data_s` + `compute_s` + `wait_s` + `comm_s` + `apply_s`, where `wait_s` is for slower ranks only.
    """

    number: int
    loss: float | None
    """None: it was nan or infinite."""
    metrics: Mapping[str, float | None] = {}
    grad_norm: float | None = None
    lr: float | None = 0.0
    samples: int = 0
    weight: float = 0.0
    skipped: str = ""
    wall_s: float = 0.0
    predicted_s: float = 0.0
    """What the cost model says a step under this plan takes; 0: nothing is known yet."""
    eta: float = 0.0
    """What part of the devices' summed speed this step made use of; 0: not known yet."""
    shares: tuple[int, ...] = ()
    """Samples that each rank computed."""
    compute_s: tuple[float, ...] = ()
    data_s: tuple[float, ...] = ()
    wait_s: tuple[float, ...] = ()
    apply_s: tuple[float, ...] = ()
    comm_s: float = 0.0
    sent_bytes: tuple[int, ...] = ()
    """Gradients, parameters and activations handed to links since the step before."""
    stalled: tuple[int, ...] = ()
    """Ranks that others stood in for."""
    plan: str = ""
    """The plan's id."""
    generation: int = 0
    epoch: int = 0


class Vitals(Event, tag="vitals", frozen=True, kw_only=True):
    """How the devices are, every few seconds; 0: not known. Empty tuples: not known of any."""

    step: int
    memory_bytes: tuple[int, ...] = ()
    """In use now."""
    peak_memory_bytes: tuple[int, ...] = ()
    temperature_c: tuple[float, ...] = ()
    clock_mhz: tuple[float, ...] = ()
    busy: tuple[float, ...] = ()
    """Part of the time in which the device worked, for anybody."""


class Decided(Event, tag="decision", frozen=True, kw_only=True):
    """A change of plan; see `ragtag.Decision`. Written again, with the same `step` and `decided`, once it was seen what
    it achieved."""

    step: int
    decided: str
    """The decision's kind."""
    reason: str
    predicted_gain: float = 0.0
    predicted_step_s: float = 0.0
    achieved_step_s: float | None = None
    achieved_over: int = 0


class Finding(Event, tag="finding", frozen=True, kw_only=True):
    """Who holds the others up, and why.

    Written when it is found; again, with the same `since_step`, when it costs twice as much; and with `over` when it no
    longer does, or the cause is another one. A new generation ends all of them without a word.
    """

    step: int
    rank: int
    name: str
    host: str
    cause: Cause
    since_step: int
    lost_s: float
    """Seconds that each step takes longer because of it; where it is over, each of its steps on average."""
    text: str
    """The finding in one line that a person understands, with numbers."""
    over: bool = False


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """What a device adds."""

    rank: int
    name: str
    gain: float
    """Steps a second with it over those without it, less 1; negative: the run would be faster without it."""
    text: str
    """"adds 9 %", "costs 4 %"."""


class Verdict(Event, tag="verdict", frozen=True, kw_only=True):
    """What each device adds, worked out from speeds as they are after step `step`."""

    step: int
    devices: tuple[Worth, ...]


class Evaluated(Event, tag="evaluation", frozen=True, kw_only=True):
    """What `Trainer.evaluate` returned."""

    step: int
    value: float | None
    metrics: Mapping[str, float | None] = {}


class Saved(Event, tag="checkpoint", frozen=True, kw_only=True):
    """A checkpoint is complete."""

    step: int
    path: str
    took_s: float = 0.0


class Said(Event, tag="message", frozen=True, kw_only=True):
    """A line that the run or its hub has said."""

    level: Literal["info", "warning", "error"] = "info"
    text: str
    source: str = ""
    """"hub", or a rank's name."""


class Contributed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One island's part of a merge."""

    island: str
    weight: float
    """Its part of the merge; all of them add up to 1."""
    tokens: float = 0.0
    """Total weight of the samples behind it."""
    age: int = 0
    """For how many rounds it is late."""
    sent_bytes: int = 0
    """As it travelled."""
    plain_bytes: int = 0
    """In fp32."""


class Exchanged(Event, tag="exchange", frozen=True, kw_only=True):
    """Islands have merged a fragment of the model: an outer step of it."""

    fragment: int
    version: int
    islands: tuple[Contributed, ...]
    inner_steps: int = 0
    """H: steps from one exchange of a fragment to the next."""
    took_s: float = 0.0
    """From the first contribution to the merge."""
    reason: str = ""
    """Why then."""
    norm: float | None = 0.0
    """Of what the merge has changed."""


class IslandChanged(Event, tag="island", frozen=True, kw_only=True):
    """An island has come, gone, or sent what was not taken."""

    island: str
    change: Literal["attached", "lost", "left", "refused", "denied"]
    text: str = ""


class Retuned(Event, tag="tempo", frozen=True, kw_only=True):
    """How islands exchange from now on, and why."""

    inner_steps: int
    codec: str = ""
    blocking: bool = False
    shares: Mapping[str, float] = {}
    """By island, its part of the global batch."""
    reason: str = ""


class Guarded(Event, tag="guard", frozen=True, kw_only=True):
    """What merging does to the loss of fresh batches, as an island has seen it."""

    island: str
    before: float | None
    after: float | None
    noise: float | None = 0.0
    """Standard error of the difference."""
    action: str = ""
    """What follows; empty: nothing does."""


class Ended(Event, tag="ended", frozen=True, kw_only=True):
    """The run is over, or stops here until it is resumed."""

    step: int
    reason: str = ""
    """Empty: the script has run to its end."""


AnyEvent: TypeAlias = (
    Began
    | Members
    | Planned
    | Looped
    | Step
    | Vitals
    | Decided
    | Finding
    | Verdict
    | Evaluated
    | Saved
    | Said
    | Exchanged
    | IslandChanged
    | Retuned
    | Guarded
    | Ended
)
