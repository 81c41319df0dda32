"""Notice whether code drew from the global random generators, by comparing their states before and after."""

import random
import sys
from typing import Any

import torch


class RandomWatch:
    """Remembers the state of torch's generators (and, unless `torch_only`, of `random` and NumPy's) when made."""

    def __init__(self, device: torch.device, *, torch_only: bool = False) -> None:
        self._device = device
        self._torch_only = torch_only
        self._before = self._states()

    def _states(self) -> list[Any]:
        states: list[Any] = [torch.get_rng_state()]
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device)
            # A device that has no number among its kind (MPS) takes none here.
            named = self._device.index is not None and self._device.type != "mps"
            states.append(module.get_rng_state(self._device) if named else module.get_rng_state())
        if self._torch_only:
            return states
        states.append(random.getstate())
        if numpy := sys.modules.get("numpy"):
            name, keys, *position = numpy.random.get_state()
            states.append((name, keys.tobytes(), *position))
        return states

    def drew(self) -> bool:
        """Whether any of them moved since."""
        return any(
            not torch.equal(now, before) if isinstance(now, torch.Tensor) else now != before
            for now, before in zip(self._states(), self._before)
        )
