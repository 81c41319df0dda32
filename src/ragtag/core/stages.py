"""Stages of pipelines as text, "rank:first-stop" each, for settings, plan files and messages.

The one idea: every pipeline holds every block once, and no rank holds two stages; text that says otherwise is refused
with what is missing.
"""

import re
from collections.abc import Sequence

from ragtag.core.errors import SettingError
from ragtag.core.values import Stage, Stages

_STAGE = re.compile(r"(\d+):(\d+)-(\d+)")


def stages_from_text(text: str) -> Stages:
    """Return what "0:0-5, 1:5-8 / 2:0-8" says.

    Raises:
        SettingError: it says nothing of that form.
    """
    pipelines = []
    for part in text.split("/"):
        found = [_STAGE.fullmatch(word.strip()) for word in part.split(",")]
        if not all(found):
            raise SettingError(
                f"stages = '{text}' is not valid. Expected rank:first-stop in the order in which samples pass, "
                f"and / between pipelines: stages='0:0-5, 1:5-8'."
            )
        numbers = [tuple(map(int, match.groups())) for match in found if match]
        pipelines.append(tuple(Stage(rank=rank, first=first, stop=stop) for rank, first, stop in numbers))
    return tuple(pipelines)


def text_from_stages(stages: Stages) -> str:
    """Return the text that `stages_from_text` reads."""
    return " / ".join(
        ", ".join(f"{stage.rank}:{stage.first}-{stage.stop}" for stage in pipeline) for pipeline in stages
    )


def check_stages(stages: Stages, *, world_size: int, num_blocks: int) -> None:
    """Raise SettingError unless every pipeline holds the blocks 0 .. `num_blocks` - 1 in order, and no rank twice."""
    text = text_from_stages(stages)
    ranks = [stage.rank for pipeline in stages for stage in pipeline]
    if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        raise SettingError(f"stages = '{text}': rank {twice[0]} has two stages. Give each rank one.")
    if outside := [rank for rank in ranks if rank >= world_size]:
        raise SettingError(f"stages = '{text}': there is no rank {outside[0]} among {world_size}.")
    for pipeline in stages:
        at = 0
        for stage in pipeline:
            if stage.first != at or stage.stop <= stage.first:
                raise SettingError(
                    f"stages = '{text}': the stage of rank {stage.rank} is {stage.first}-{stage.stop}. Expected at "
                    f"least one block, from {at} on."
                )
            at = stage.stop
        if at != num_blocks:
            raise SettingError(
                f"stages = '{text}': a pipeline ends before block {at}, and the model has {num_blocks} blocks."
            )


def feeding_ranks(stages: Stages, world_size: int) -> tuple[int, ...]:
    """Return by rank the rank whose samples it reads: that of its pipeline's last stage; itself outside of all."""
    owners = list(range(world_size))
    for pipeline in stages:
        for stage in pipeline:
            owners[stage.rank] = pipeline[-1].rank
    return tuple(owners)


def shares_of(stages: Stages, world_size: int, samples: Sequence[int]) -> tuple[int, ...]:
    """Return shares by rank, where `samples` are those of each pipeline."""
    shares = [0] * world_size
    for pipeline, count in zip(stages, samples):
        shares[pipeline[-1].rank] = count
    return tuple(shares)
