"""Experimental: gradients summed where they are, on accelerators, by NCCL, instead of by the ring through host memory.

The one idea: whatever belongs to a step besides the sum itself, votes, ledger, membership, stays as it is; a generation
that ends aborts its communicator, as it closes its sockets. Reviewed, and tested with gloo in NCCL's place, but never
run on GPUs by its authors.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ragtag.comm.transport import TransportError
from ragtag.core.errors import SettingError


class DeviceSum(Protocol):
    """Sums over the ranks of one generation. One thread calls `all_reduce`, in the same order on every rank."""

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Sum `flat` over ranks in place, in its own dtype; return when it is done, after a bounded time.

        Raises:
            TransportError: another rank is gone or silent, or `abort` was called.
        """
        ...

    def abort(self) -> None:
        """End what is under way, from any thread; may be called twice."""
        ...


MakeDeviceSum = Callable[[dist.Store, int, int, float], DeviceSum]
"""Called with a store of the generation's own, rank, number of ranks and patience in seconds; meets the other ranks."""


class ProcessGroupSum:
    """A process group of torch.distributed."""

    def __init__(self, group: Any, patience_s: float) -> None:
        self._group, self._patience = group, timedelta(seconds=patience_s)
        self._aborted = False

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Sum it."""
        try:
            self._group.allreduce([flat]).wait(self._patience)
            if flat.device.type == "cuda":
                # NCCL's wait holds up the stream only; whoever waits for this work then reads `flat` on another one.
                torch.cuda.current_stream(flat.device).synchronize()
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise TransportError(f"summing on devices: {reason}", peer=None, timed_out="imeout" in reason) from error

    def abort(self) -> None:
        """End it."""
        if not self._aborted:
            self._aborted = True
            abort = getattr(self._group, "abort", None)
            if abort is not None:
                abort()


def nccl_sum(store: dist.Store, rank: int, world_size: int, patience_s: float) -> DeviceSum:
    """Meet the other ranks in `store` and return NCCL's sum."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=patience_s)
    return ProcessGroupSum(dist.ProcessGroupNCCL(store, rank, world_size, options), patience_s)


def require_nccl(device: torch.device, rank: int, host: str) -> None:
    """Make sure that this rank can take part.

    Raises:
        SettingError: it computes on something else than an NVIDIA GPU, or this torch has no NCCL.
    """
    if device.type != "cuda" or torch.version.cuda is None or not dist.is_nccl_available():
        raise SettingError(
            f"reduce='nccl' sums gradients with NCCL, which needs an NVIDIA GPU on every rank, but rank {rank} "
            f"({host}) computes on {device} with torch {torch.__version__}. Leave reduce out: the ring takes any mix "
            f"of devices."
        )


class Recorded:
    """A moment on the stream of the thread that hands a tensor over, for the thread that sums it."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._event: Any = None
        if flat.device.type != "cpu":
            self._event = torch.Event(flat.device)
            self._event.record()

    def wait(self) -> None:
        """Return when everything before it is done."""
        if self._event is not None:
            self._event.synchronize()
