"""Reads torchrun's or `ragtag launch`'s environment into one value, or says which variable is wrong.

The one idea: an environment is complete, or absent, or an error that names the variable and what to type; nothing is
guessed, because a wrong guess hangs every other rank.
"""

from collections.abc import Mapping

import msgspec

from ragtag.core.errors import LaunchError

_START = (
    "Start the script with `torchrun --nproc-per-node=N train.py` or `ragtag launch --local N train.py`, "
    "or as a plain `python train.py` for one process"
)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """This process's place among the ranks, and where they meet."""

    rank: int
    world_size: int
    local_rank: int
    address: str = ""
    """MASTER_ADDR as given; empty only in a world of one."""
    port: int = 0
    run_id: str = ""
    agent_hosts_store: bool = False
    """Whether torchrun's agent hosts the store; otherwise rank 0 does."""
    store_fd: int | None = None
    """A bound socket that `ragtag launch` left for rank 0's store."""


def read_environment(environ: Mapping[str, str]) -> Place | None:
    """Return the place that `environ` gives this process; None: it is alone and nobody launched it.

    Raises:
        LaunchError: a variable is missing, no number, or out of range.
    """
    given = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if environ.get(name)]
    if not given:
        return None
    for name in ("RANK", "WORLD_SIZE"):
        if not environ.get(name):
            raise LaunchError(
                f"{given[0]}={environ[given[0]]} is set in the environment but {name} is not. {_START} "
                f"(`unset {' '.join(given)}` first)."
            )
    world_size = _number(environ, "WORLD_SIZE", 1, 1 << 20)
    rank = _number(environ, "RANK", 0, world_size - 1, f" with WORLD_SIZE={world_size}")
    local_rank = _number(environ, "LOCAL_RANK", 0, 1 << 20) if environ.get("LOCAL_RANK") else 0
    if world_size == 1:
        return Place(rank=rank, world_size=1, local_rank=local_rank)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise LaunchError(
                f"RANK={rank} and WORLD_SIZE={world_size} are set in the environment but {name} is not: "
                f"this rank cannot find the others. {_START}, or set MASTER_ADDR and MASTER_PORT on every rank."
            )
    store_fd = None
    if rank == 0 and environ.get("RAGTAG_STORE_FD"):
        store_fd = _number(environ, "RAGTAG_STORE_FD", 0, 1 << 20)
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        address=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT", 1, 65535),
        run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        store_fd=store_fd,
    )


def _number(environ: Mapping[str, str], name: str, least: int, most: int, given: str = "") -> int:
    text = environ[name].strip()
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise LaunchError(
            f"{name}={environ[name]!r} in the environment{given} must be a whole number from {least} to {most}. "
            f"{_START}; `unset {name}` first."
        )
    return int(text)
