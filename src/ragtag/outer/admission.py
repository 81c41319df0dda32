"""Which islands may take part: those that train the same model, in the same run, with the same ragtag.

The one idea: every reason names both sides, since whoever reads it sits at one of them.
"""

from typing import Protocol

from ragtag.outer.protocol import Attach

NAME_LIMIT = 64
_MOST_FRAGMENTS = 1024


class Trained(Protocol):
    """What the first island trains."""

    @property
    def model(self) -> str:
        """Hash of names, shapes and cut."""
        ...

    @property
    def numel(self) -> tuple[int, ...]:
        """Numbers in each fragment."""
        ...

    @property
    def data(self) -> str:
        """ "global" or "local"."""
        ...

    @property
    def batch(self) -> int:
        """Samples of one step of all islands together."""
        ...


def why_denied(frame: Attach, trained: Trained | None, *, run: str, version: str) -> str:
    """Return why an island is not taken; empty: it is. `trained` is None before the first one has come."""
    if frame.run != run:
        return f"it is of the run '{frame.run[:NAME_LIMIT]}', and this is '{run}'"
    if frame.version != version:
        return f"it has ragtag {frame.version[:NAME_LIMIT]}, and the hub has {version}"
    if not 0 < len(frame.island) <= NAME_LIMIT or not frame.island.isprintable():
        return f"an island's name has 1 to {NAME_LIMIT} printable characters"
    if not 0 < len(frame.numel) <= _MOST_FRAGMENTS or min(frame.numel) < 0:
        return f"it cuts its model into {len(frame.numel)} fragments"
    if frame.dataset < 1:
        return f"its data has {frame.dataset} samples"
    if trained is None:
        return ""
    if (frame.model, frame.numel) != (trained.model, trained.numel):
        return f"its model has other parameters ({sum(frame.numel)} numbers, and here are {sum(trained.numel)})"
    if frame.data != trained.data:
        return f'its data is "{frame.data}", and the first island\'s is "{trained.data}"'
    if frame.batch != trained.batch:
        return f"its global batch is {frame.batch}, and the first island's is {trained.batch}"
    return ""
