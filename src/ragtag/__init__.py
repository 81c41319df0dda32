"""ragtag: train one PyTorch model on machines that do not match, with the same result one big device would give.

Import is cheap: names that need torch are loaded when first used.
"""

from typing import TYPE_CHECKING, Any

from ragtag.core.config import Config
from ragtag.core.decision import Decision
from ragtag.core.errors import (
    CheckpointError,
    DataError,
    DeviceMemoryError,
    DisagreementError,
    LaunchError,
    LossError,
    ModelError,
    NonFiniteError,
    PeerError,
    PeerFailed,
    PeerLost,
    RagtagError,
    SettingError,
)
from ragtag.core.values import Plan, StepReport

if TYPE_CHECKING:
    from ragtag.runtime.evaluation import Evaluation
    from ragtag.runtime.loss import Loss
    from ragtag.runtime.trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "Config",
    "DataError",
    "Decision",
    "DeviceMemoryError",
    "DisagreementError",
    "Evaluation",
    "LaunchError",
    "Loss",
    "LossError",
    "ModelError",
    "NonFiniteError",
    "PeerError",
    "PeerFailed",
    "PeerLost",
    "Plan",
    "RagtagError",
    "SettingError",
    "StepReport",
    "Trainer",
]
_WITH_TORCH = {
    "Evaluation": "ragtag.runtime.evaluation",
    "Loss": "ragtag.runtime.loss",
    "Trainer": "ragtag.runtime.trainer",
}


def __getattr__(name: str) -> Any:
    """Load the torch-dependent part of the public interface on first use."""
    if name in _WITH_TORCH:
        import importlib

        value = getattr(importlib.import_module(_WITH_TORCH[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ragtag' has no attribute '{name}'")
