"""How a run becomes an island's: by what the launcher says, or by joining others who are one.

The one idea: without $RAGTAG_OUTER nothing here changes anything.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ragtag.core.errors import SettingError
from ragtag.runtime.islands.leader import Place
from ragtag.runtime.islands.sampling import of_island
from ragtag.runtime.islands.taking_part import TakingPart
from ragtag.runtime.run import Run


def join_island(run: Run, state: Mapping[str, Any] | None) -> None:
    """This rank has joined others, who are an island among others, or are not."""
    if state is None:
        return
    if not isinstance(run.islands, TakingPart):
        run.islands = TakingPart(run, None)
        run.sampler = of_island(run.sampler, "")
    run.islands.join(run, state)


def with_islands(prepare: Callable[..., Run], *arguments: Any, **settings: Any) -> Run:
    """The run that `prepare` makes, as one of an island where $RAGTAG_OUTER (host:port) and $RAGTAG_ISLAND say so.

    Raises:
        SettingError: it cannot be one.
    """
    run, environ = prepare(*arguments, **settings), os.environ
    hub, island = environ.get("RAGTAG_OUTER", ""), environ.get("RAGTAG_ISLAND", "")
    config = run.config
    if not hub:
        if config.mode in ("islands", "async"):
            raise SettingError(
                f'mode = "{config.mode}" needs an island: start it with `ragtag launch --island NAME`, at each site.'
            )
        return run
    refuse_others(run)
    run.islands = TakingPart(run, Place(hub=hub, island=island, run=environ.get("RAGTAG_RUN", "run")))
    run.sampler = of_island(run.sampler, island)
    return run


def refuse_others(run: Run) -> None:
    """Raise SettingError where what is trained cannot be one island of several."""
    layout = run.config.layout
    if run.sharding is not None or run.pipe is not None or layout not in ("auto", "replicated"):
        raise SettingError(
            f"islands exchange parameters that are whole on every rank, and layout is '{layout}'. Use "
            f'Config(layout="replicated"), or train without --island.'
        )
    # Means of parameters are those of gradients where a step is linear in them; others see their own site's only.
    if run.config.mode == "exact" and (type(run.optimizer) is not torch.optim.SGD or run.clip_norm is not None):
        what = "clip_norm" if type(run.optimizer) is torch.optim.SGD else type(run.optimizer).__name__
        raise SettingError(
            f'mode = "exact" across islands is exact for torch.optim.SGD without clip_norm only, and this run has '
            f"{what}. Leave --island out, where all workers can reach each other (ragtag launch --hub HOST:PORT), or "
            f'take mode = "islands".'
        )
