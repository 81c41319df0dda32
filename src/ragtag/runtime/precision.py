"""Autocast and the one loss scale.

In fp16 every rank multiplies by the same scale, because a sum of differently scaled gradients is wrong; the scale moves
only at a committed or skipped step, from facts that all ranks share (pytorch#136009, #90057).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ragtag.core.errors import SettingError, did_you_mean

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str) -> None:
    """Raise SettingError unless it is one of fp32, bf16 and fp16."""
    if precision not in PRECISIONS:
        raise SettingError(
            f"precision={precision!r} is unknown; expected one of {', '.join(PRECISIONS)}."
            f"{did_you_mean(str(precision), PRECISIONS)}"
        )


def supported_precision(precision: str, device: torch.device) -> tuple[str, str]:
    """The precision this device computes in, and the reason when it is not the one asked for.

    Reductions are in fp32 whatever a device computes in, so a rank without bf16 (V100, 2080 Ti) may use fp32.
    """
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp32", f"{torch.cuda.get_device_name(device)} has no bf16: it computes in fp32, the others in bf16"
    return precision, ""


@contextmanager
def autocast(precision: str, device: torch.device) -> Iterator[None]:
    """Mixed precision for forward and loss, or nothing for fp32."""
    dtype = PRECISIONS[precision]
    if dtype is None:
        yield
    else:
        with torch.autocast(device.type, dtype=dtype):
            yield


class LossScale:
    """Dynamic loss scale of mixed-precision training in fp16 (Micikevicius et al. 2018); constant 1 otherwise.

    Halved after a non-finite step, doubled after `growth_interval` good ones.
    """

    def __init__(self, precision: str, *, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self._dynamic = precision == "fp16"
        self._growth_interval = growth_interval
        self._good_steps = 0
        self.value = initial if self._dynamic else 1.0

    @property
    def backs_off(self) -> bool:
        """Whether a non-finite step would be explained by the scale being too high."""
        return self._dynamic and self.value > 1.0

    def update(self, *, finite: bool) -> bool:
        """Move the scale after a step; returns whether a non-finite step is explained by the scale being too high."""
        if not self._dynamic:
            return False
        if not finite:
            self._good_steps = 0
            backing_off = self.backs_off
            self.value = max(1.0, self.value / 2)
            return backing_off
        self._good_steps += 1
        if self._good_steps >= self._growth_interval:
            self._good_steps = 0
            self.value *= 2
        return False

    def state_dict(self) -> dict[str, float | int]:
        """Scale and the number of good steps since it last moved."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore what `state_dict` gave."""
        self.value = float(state["value"])
        self._good_steps = int(state["good_steps"])
