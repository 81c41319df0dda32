"""The error tree. A message says what happened, where (rank, host, device), what was expected, and what to type next.

Users' mistakes are also `ValueError`s that name the setting. Errors that several ranks raise at once carry
`origin_rank`, so that a launcher or excepthook can print them exactly once.
"""

import difflib
from collections.abc import Iterable


class RagtagError(Exception):
    """Base of everything ragtag raises on purpose."""

    origin_rank: int | None = None
    """The rank that prints this error, where all ranks raise the same one; None: whoever raises it prints it."""


class SettingError(RagtagError, ValueError):
    """A setting is misspelt, has the wrong type or value, or contradicts another one."""


class ModelError(RagtagError, ValueError):
    """The model, optimizer or scheduler is of a kind ragtag cannot train exactly, named with the way out."""


class LossError(RagtagError, ValueError):
    """`loss_fn` or `metric_fn` returned something that cannot be weighted exactly."""


class DataError(RagtagError, ValueError):
    """The dataset is empty, of an unsupported kind, or failed to give a sample."""


class DisagreementError(RagtagError, ValueError):
    """Ranks were started with different models, data or settings, or their replicas drifted apart."""


class LaunchError(RagtagError, ValueError):
    """The environment or the network does not let the ranks find each other."""


class CheckpointError(RagtagError, ValueError):
    """A checkpoint cannot be read or written: file, reason and what was left intact."""


class NonFiniteError(RagtagError, ArithmeticError):
    """Too many steps in a row gave a non-finite loss or gradient; names rank, step and samples."""


class DeviceMemoryError(RagtagError, RuntimeError):
    """What has to be computed in one forward fits into no rank's memory, however small it was cut."""


class PeerError(RagtagError, RuntimeError):
    """Another rank ended: it failed, went silent, or left early. Carries which one."""

    def __init__(self, message: str, *, rank: int | None = None, host: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.origin_rank = rank


class PeerFailed(PeerError):
    """Another rank raised an error and told the others; the message holds that error."""


class PeerLost(PeerError):
    """Another rank died, froze or became unreachable: no sign of life within `patience_s`."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest of `known`, or an empty string when nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
