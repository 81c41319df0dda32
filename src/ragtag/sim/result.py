"""What a simulated training came to: figures, decisions, shares over time and the last steps for a picture."""

import msgspec

from ragtag.core.decision import Decision


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """One step as a report of the runtime has it; tuples by rank, seconds."""

    step: int
    wall_s: float
    shares: tuple[int, ...]
    compute_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    comm_s: float


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """From `at_s` on each rank was to compute `shares` samples a step."""

    at_s: float
    shares: tuple[int, ...]


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """A device left or came, and what it cost everybody."""

    at_s: float
    device: str
    what: str
    lost_s: float = 0.0


class SimulatedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device over the whole run."""

    name: str
    host: str
    solo_samples_per_s: float
    samples: int
    """Committed."""
    present_s: float
    busy_s: float
    """Forward and backward, also of what was lost later."""
    useful_s: float
    """What its committed samples would have taken it alone."""


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """One way of training, over one stretch of virtual time."""

    name: str
    wall_s: float
    steps: int
    """Committed and not lost."""
    samples: int
    samples_per_s: float
    eta: float
    """Samples over what the devices that were there would have done alone in the same time."""
    device_hours: float
    wasted_device_hours: float
    """Device-hours beside those that the committed samples would have taken each device alone: waiting, communication,
    work that was thrown away, restarts."""
    lost_s: float
    """Wall time that changes of membership cost: work lost since the checkpoint, restarts, regrouping."""
    devices: tuple[SimulatedDevice, ...]
    decisions: tuple[Decision, ...] = ()
    incidents: tuple[Incident, ...] = ()
    shares: tuple[Shares, ...] = ()
    last_steps: tuple[Steps, ...] = ()
    price: float = 0.0
    """What the devices' hours cost."""
