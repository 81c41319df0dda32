"""A cluster as its owner describes it: devices, links between their hosts, and how to pretend to be them.

The one idea: planning, simulation and emulation share one description; `core/cluster_file.py` reads it from TOML.
"""

from typing import Literal

import msgspec


class DriftPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The speed a device has reached at `step`."""

    step: int
    speed: float


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """A device that has its own speed for `period` steps, then `speed` for as many, and so on."""

    period: int
    speed: float


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A device that does nothing for `seconds` before `micro_batch` (from 0) of `step` (from 1)."""

    step: int
    micro_batch: int = 0
    seconds: float


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of device, `count` times."""

    name: str
    host: str = "localhost"
    kind: str = "cpu"
    speed: float = 1.0
    """Relative to a device of speed 1, which takes `Emulation.sample_s` for forward and backward of a sample."""
    memory_bytes: int | None = None
    """None: not known, not limited."""
    cpu_percent: float | None = None
    """Quota of CPU time of its process, in percent of one core; None: not limited."""
    price_per_hour: float = 0.0
    count: int = 1
    drift: tuple[DriftPoint, ...] = ()
    """Later speeds, by growing step; the last one stays."""
    drift_kind: Literal["slide", "step"] = "slide"
    """Whether speed slides from point to point (from `speed` at step 0) or jumps at each."""
    flip: Flip | None = None
    stall: tuple[Stall, ...] = ()


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What lies between two hosts, in each direction."""

    between: tuple[str, str]
    bandwidth_bytes_per_s: float | None = None
    """None: not limited."""
    latency_s: float = 0.0


class Emulation(msgspec.Struct, frozen=True, kw_only=True):
    """What work costs a device of speed 1, in seconds, and how much that varies."""

    sample_s: float | None = None
    """Forward and backward of one sample; None: speed is not emulated."""
    micro_batch_s: float = 0.0
    """Starting a micro-batch, whatever its size."""
    optimizer_s: float = 0.0
    """The optimizer step; 0: takes what it takes."""
    fixed_s: float = 0.0
    """Other work of a step that does not shrink with the batch; 0: takes what it takes."""
    jitter: float = 0.0
    """Sigma of the factor exp(sigma * gauss) by which work is slower; 0.3 is "30 % unpredictable slowdown"."""
    jitter_per: Literal["step", "micro_batch"] = "step"
    seed: int = 0


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Devices and links; `cluster_file.load_cluster` makes a checked one."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    emulation: Emulation = Emulation()

    def expanded(self) -> tuple[Device, ...]:
        """Return one device of count 1 for every device there is, in the order of ranks; "box" x 2 is "box-0",
        "box-1"."""
        return tuple(
            device if device.count == 1 else msgspec.structs.replace(device, name=f"{device.name}-{index}", count=1)
            for device in self.devices
            for index in range(device.count)
        )

    def link_between(self, host: str, other: str) -> Link | None:
        """Return the link between two hosts, or None where nothing limits them."""
        return next((link for link in self.links if {host, other} == set(link.between)), None)
