"""A way to train on a cluster, and what it is predicted to do: the records between search, prediction and reader.

The one idea: a candidate says everything that the runtime would have to do, whether or not it can do so already.
"""

from typing import Literal

import msgspec

Layout = Literal["replicated", "zero-1", "zero-2", "zero-3", "pipeline", "islands"]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one device does in a step."""

    device: str
    """Its name in the cluster."""
    samples: int
    """Of the global batch; in a pipeline, of those that pass its stage."""
    micro_batch: int
    """Most samples of one forward."""
    recompute: bool = False
    """Activations are computed again in backward, to save memory."""
    state_bytes: int | None = None
    """Its slice of what the layout shards; None: nothing is sharded."""
    blocks: tuple[int, int] | None = None
    """In a pipeline: the first block of its stage and the one after its last."""
    island: int = 0
    """Exact synchronisation is within an island."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A way to train; `parts` in the order of ranks."""

    name: str
    """What it is called in a table, and to tell it from others of its layout."""
    layout: Layout
    parts: tuple[Part, ...]
    left_out: tuple[str, ...] = ()
    """Devices that do not take part."""
    unit: int = 1
    inner_steps: int = 0
    """Islands: steps between two outer exchanges."""
    asynchronous: bool = False
    """Islands: what comes is merged when it comes."""
    note: str = ""
    """What it rests on, in words."""
    not_yet: str = ""
    """What the runtime cannot do yet; empty: it can run this."""


class DevicePrediction(msgspec.Struct, frozen=True, kw_only=True):
    """One device in one step."""

    device: str
    samples: int
    compute_s: float
    """Forward and backward."""
    constant_s: float
    """Optimizer and other work that does not shrink with the share."""
    wait_s: float
    """Until the slowest device has done its work."""
    memory_bytes: int | None
    """None: not measured."""
    capacity_bytes: int | None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate is predicted to do."""

    step_s: float
    samples_per_s: float
    eta: float
    """samples_per_s over the sum of what each device of the cluster would do alone, those left out included."""
    comm_s: float
    """Communication that no computation hides, the vote included."""
    noise_s: float = 0.0
    """What waiting for the unlucky one adds, where speeds vary from step to step."""
    sample_efficiency: float = 1.0
    """Progress per sample against exact synchronisation: 1, or less for an outer loop."""
    devices: tuple[DevicePrediction, ...]
    usd_per_million_samples: float | None = None
    """None: no device that takes part has a price."""

    @property
    def effective_samples_per_s(self) -> float:
        """What candidates are compared by."""
        return self.samples_per_s * self.sample_efficiency
