"""What a launch shows of its run: progress on the terminal, the page, and other tools that are fed from its log.

The one idea: all of them only read the log, so a launch has them or not without any difference to the training.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ragtag.cli.console import Console
from ragtag.cli.page_process import PageProcess
from ragtag.cli.run_directory import LOG_NAME
from ragtag.cli.worker_process import die_with, say
from ragtag.core.errors import SettingError

_DRAIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is to be shown."""

    quiet: bool = False
    page: bool = True
    page_port: int = 0
    tensorboard: Path | None = None
    prometheus: int | None = None
    wandb: str | None = None

    @property
    def sinks(self) -> tuple[str, ...]:
        """Words for `ragtag.watch.feed`."""
        named = (("--tensorboard", self.tensorboard), ("--prometheus", self.prometheus), ("--wandb", self.wandb))
        return tuple(word for name, value in named if value is not None for word in (name, str(value)))


class Views:
    """Call `look` often, and `close` at the end.

    Args:
        shown: what is wanted.
        directory: of the run; None: it writes no log, and nothing can be shown.
        environ: of the launcher.

    Raises:
        LaunchError: the page's port is taken.
        SettingError: a package that a sink needs is missing.
    """

    def __init__(self, shown: Shown, directory: Path | None, environ: Mapping[str, str]) -> None:
        self._page: PageProcess | None = None
        self._console: Console | None = None
        self._feed: subprocess.Popen[bytes] | None = None
        if directory is None:
            return
        log = directory / LOG_NAME
        if shown.sinks:
            check_sinks(shown)
            self._feed = subprocess.Popen(
                [sys.executable, "-m", "ragtag.watch.feed", "--log", str(log.absolute()), *shown.sinks],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        if shown.page:
            token = secrets.token_urlsafe(16)
            self._page = PageProcess(log=log, address="127.0.0.1", port=shown.page_port, token=token, environ=environ)
            if not shown.quiet:
                say(f"watch it at {self._page.url}")
        if not shown.quiet:
            self._console = Console(log)

    def look(self) -> None:
        """Do what is due."""
        if self._page is not None:
            self._page.look_after()
        if self._console is not None:
            self._console.update()

    def close(self) -> None:
        """Give the terminal back, end the page, and let sinks take what is left."""
        if self._console is not None:
            self._console.close()
        if self._page is not None:
            self._page.close()
        if self._feed is not None:
            self._feed.terminate()
            try:
                self._feed.wait(_DRAIN_S)
            except subprocess.TimeoutExpired:
                self._feed.kill()
                self._feed.wait()


def check_sinks(shown: Shown) -> None:
    """Raise SettingError where a package is missing that is asked for: better before the run than in it."""
    from importlib.util import find_spec

    for wanted, package, extra in (
        (shown.tensorboard, "tensorboard", "tensorboard"),
        (shown.prometheus, "prometheus_client", "prometheus"),
        (shown.wandb, "wandb", "wandb"),
    ):
        if wanted is not None and find_spec(package) is None:
            raise SettingError(f"--{extra} needs a package that is not installed: pip install 'ragtag[{extra}]'.")
