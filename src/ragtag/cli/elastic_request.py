"""What the words of `ragtag launch` mean for a run whose machines come and go: where its hub is, or is to be.

The one idea: either this machine starts the run and has its hub, or it joins one; words for the one are mistakes in the
other, and are named before anything is started.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragtag.core.config import Config
from ragtag.core.errors import SettingError
from ragtag.core.hub_address import hub_address

_LONGEST_NAME = 64


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Where the run's hub is, or is to be."""

    hub: str | None = None
    """HOST:PORT of one that runs; None: this machine runs it."""
    token: str = ""
    address: str = "127.0.0.1"
    """What a hub of this machine listens on."""
    port: int = 0
    run: str = "run"
    directory: Path | None = None
    """Where a hub of this machine keeps its journal and the run's log; None: a new one under `runs`."""
    patience_s: float = 30.0
    island: str | None = None
    """What this site is called among others that train over slow links; None: it is not one of several."""
    outer: str | None = None
    """HOST:PORT of the hub that merges islands; None: this machine's does, where this is an island."""
    certificate: Path | None = None
    key: Path | None = None
    """For TLS at the hub of this machine."""


def is_elastic(wanted: bool | None, *, pinned: bool, joining: Sequence[str]) -> bool:
    """Return whether workers may come and go: wherever nothing on the command line speaks against it.

    Args:
        wanted: what --elastic or --fixed says; None: neither is there.
        pinned: shares or stages are, each to one of a fixed number of workers.
        joining: the words that are there and that only a run with a hub can do something with.

    Raises:
        SettingError: --fixed and one of those words.
    """
    if wanted is False and joining:
        raise SettingError(f"--fixed is a run that nobody joins, and {joining[0]} is for one that others join.")
    return bool(joining) or (not pinned if wanted is None else wanted)


def elastic_request(
    *,
    hub: str | None = None,
    token: str | None = None,
    address: str | None = None,
    port: int = 0,
    directory: Path | None = None,
    island: str | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Elastic:
    """Return what the words of the command line ask for.

    Raises:
        SettingError: they contradict each other, or patience_s is no number; nothing was started.
    """
    if island is not None and not (0 < len(island) <= _LONGEST_NAME and island.isprintable()):
        raise SettingError(f"--island {island!r} is no name. Expected 1 to {_LONGEST_NAME} printable characters.")
    if hub is not None and island is not None:
        return _island_request(hub, token, address, port, directory, island, environ)
    if hub is not None and (address is not None or port or directory is not None):
        raise SettingError("--hub joins the run of another machine; --address, --port and --run-dir are for the first.")
    if hub is not None:
        hub_address(hub)
    elif token is not None:
        raise SettingError("--token goes with --hub. To choose the token of a new run, set RAGTAG_TOKEN.")
    token = token or environ.get("RAGTAG_TOKEN", "")
    if hub is not None and not token:
        raise SettingError(
            "--hub needs the run's token: copy the whole line that `ragtag launch` printed on the first machine, or "
            "give --token."
        )
    return Elastic(
        hub=hub,
        token=token or secrets.token_hex(16),
        address=address or "127.0.0.1",
        port=port,
        directory=directory,
        patience_s=Config.resolve({}, environ=environ, directory=Path.cwd()).patience_s,
        island=island,
        certificate=certificate,
        key=key,
    )


def _island_request(
    outer: str,
    token: str | None,
    address: str | None,
    port: int,
    directory: Path | None,
    island: str,
    environ: Mapping[str, str],
) -> Elastic:
    """An island of a run that another site has started: with a hub of its own for its own workers."""
    hub_address(outer)
    token = token or environ.get("RAGTAG_TOKEN", "")
    if not token:
        raise SettingError(
            "--hub needs the run's token: copy the whole line that `ragtag launch` printed on the first site, or give "
            "--token."
        )
    return Elastic(
        token=token,
        address=address or "127.0.0.1",
        port=port,
        directory=directory,
        patience_s=Config.resolve({}, environ=environ, directory=Path.cwd()).patience_s,
        island=island,
        outer=outer,
    )
