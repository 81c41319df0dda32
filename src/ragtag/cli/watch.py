"""`ragtag watch`: a run's log in the terminal, as a page, as JSON, or passed on to other tools.

The one idea: it only reads what the run writes about itself, on this machine or through the page's address, so it can
come, go and fail without the run noticing.
"""

import io
import json
import os
import secrets
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live as Screen

from ragtag.cli.page_process import PageProcess
from ragtag.cli.run_directory import LATEST, LOG_NAME
from ragtag.core.errors import SettingError
from ragtag.core.hub_address import is_loopback
from ragtag.watch.live import Live
from ragtag.watch.reader import Follower
from ragtag.watch.sinks import Sinks, sinks_of
from ragtag.watch.terminal import Frame

_WAIT_S = 60.0
"""For a log that is not there yet."""
_INTERVAL_S = 0.3
_ANSWERS_S = 5.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for on the command line."""

    target: str | None = None
    once: bool = False
    as_json: bool = False
    web: bool = False
    port: int | None = None
    bind: str | None = None
    tensorboard: Path | None = None
    prometheus: int | None = None
    wandb: str | None = None

    @property
    def feeds(self) -> bool:
        """Whether other tools are fed."""
        return (self.tensorboard, self.prometheus, self.wandb) != (None, None, None)


def run_watch(request: Request, *, wait_s: float = _WAIT_S) -> int:
    """Show what was asked for until it is seen, the run has ended or Ctrl-C; return the exit status.

    Raises:
        SettingError: the words do not go together, there is no log, or the address does not answer.
        LaunchError: the page's port is taken.
    """
    _check(request)
    try:
        if request.target is not None and "://" in request.target:
            return _show(Remote(request.target).drawn, request)
        return _watch_log(request, wait_s)
    except KeyboardInterrupt:
        return 0


def _check(request: Request) -> None:
    if not request.web and (request.port is not None or request.bind is not None):
        raise SettingError("--port and --bind belong to the page: ragtag watch --web --port 8080")
    if request.web and (request.once or request.as_json):
        raise SettingError("--web serves a page until Ctrl-C, --once and --json print and end. Leave one of them out.")
    if request.target is not None and "://" in request.target and (request.web or request.feeds):
        raise SettingError(
            "--web, --tensorboard, --prometheus and --wandb read a log on this machine, not a page's address. Run them "
            "where the run was started, or open the address in a browser."
        )


def _watch_log(request: Request, wait_s: float) -> int:
    path = _log_path(request.target)
    if not (request.once or request.as_json or request.web):
        _await_log(path, wait_s)
    if not request.web and not path.exists():
        raise SettingError(
            f"There is no event log at {path}. `ragtag launch` writes one to runs/run-TIME/{LOG_NAME}; name a log or a "
            f"run's directory."
        )
    path = path.resolve()  # runs/latest may be another run's a moment later
    sinks = sinks_of(tensorboard=request.tensorboard, prometheus=request.prometheus, wandb=request.wandb)
    try:
        feed = _feeder(path, sinks) if request.feeds else _nothing
        if request.web:
            return _serve(path, request, feed)
        live = Live(path)

        def drawn() -> Mapping[str, Any]:
            feed()
            live.refresh()
            return {**live.drawn, "quiet_s": live.quiet_s()}

        return _show(drawn, request)
    finally:
        sinks.close()


def _log_path(target: str | None) -> Path:
    path = LATEST if target is None else Path(target)
    return path if path.suffix and not path.is_dir() else path / LOG_NAME


def _await_log(path: Path, wait_s: float) -> None:
    if path.exists() or wait_s <= 0:
        return
    _tell(f"there is no log at {path} yet; waiting for it, {wait_s:.0f} s at most")
    end_s = time.monotonic() + wait_s
    while not path.exists() and time.monotonic() < end_s:
        time.sleep(0.1)


def _nothing() -> None:
    pass


def _feeder(path: Path, sinks: Sinks) -> Callable[[], None]:
    follower = Follower(path)

    def feed() -> None:
        while events := follower.new():
            for event in events:
                sinks.take(event)

    return feed


def _serve(path: Path, request: Request, feed: Callable[[], None]) -> int:
    address = request.bind or "127.0.0.1"
    token = os.environ.get("RAGTAG_TOKEN") or secrets.token_urlsafe(18)
    page = PageProcess(log=path, address=address, port=request.port or 0, token=token, environ=os.environ, tell=_tell)
    try:
        print(f"{path} is shown at\n  {page.url}\nCtrl-C ends the page, not the run.", flush=True)
        if not is_loopback(address):
            _tell(f"whoever can read the network's traffic to {address} can read this token; ssh -L is the private way")
        while True:
            page.look_after(_INTERVAL_S)
            feed()
    finally:
        page.close()


def _show(drawn: Callable[[], Mapping[str, Any]], request: Request) -> int:
    first = drawn()
    if request.as_json:
        print(json.dumps(first))
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names may have letters that this terminal lacks
    console = Console(highlight=False)
    if not request.once and request.feeds and not console.is_terminal:
        while drawn()["now"]["status"] != "ended":
            time.sleep(_INTERVAL_S)
        return 0
    newest = first
    if not request.once and console.is_terminal and first["now"]["status"] != "ended":
        newest = _show_live(drawn, first, console)
    console.print(Frame(newest, quiet_s=newest["quiet_s"]))
    return 0


def _show_live(drawn: Callable[[], Mapping[str, Any]], first: Mapping[str, Any], console: Console) -> Mapping[str, Any]:
    """Return what was drawn last, when the run has ended or Ctrl-C was pressed."""
    newest = first
    with Screen(console=console, screen=True, auto_refresh=False) as screen:
        try:
            while newest["now"]["status"] != "ended":
                frame = Frame(newest, quiet_s=newest["quiet_s"], height=console.height)
                screen.update(frame, refresh=True)
                time.sleep(_INTERVAL_S)
                newest = drawn()
        except KeyboardInterrupt:
            pass
    return newest


class Remote:
    """The state that a run's page tells, asked for at its address.

    Args:
        url: as it was printed, with its token.

    Raises:
        SettingError: it is no such address.
    """

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        token = urllib.parse.parse_qs(parts.query).get("token", [os.environ.get("RAGTAG_TOKEN", "")])[0]
        if parts.scheme not in ("http", "https") or not parts.netloc or not token:
            raise SettingError(
                f"{url!r} is not a page's address. Expected http://HOST:PORT/?token=TOKEN, as it was printed."
            )
        self._shown = f"{parts.scheme}://{parts.netloc}"
        address = urllib.parse.urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") + "/state", "", ""))
        self._asked = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
        # A proxy has no business with a page of this network, and would be told the token.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._newest: Mapping[str, Any] | None = None

    def drawn(self) -> Mapping[str, Any]:
        """Return the state, or the last one while nobody answers.

        Raises:
            SettingError: nobody has ever answered, or the token is not this run's.
        """
        try:
            with self._opener.open(self._asked, timeout=_ANSWERS_S) as answer:
                self._newest = json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace").strip()
            raise SettingError(f"{self._shown} refuses: {said}") from None
        except (OSError, ValueError) as error:
            if self._newest is None:
                reason = getattr(error, "reason", error)
                raise SettingError(f"{self._shown} does not answer: {reason}. Does the run go on there?") from None
        assert self._newest is not None
        return self._newest


def _tell(text: str) -> None:
    print(f"ragtag watch: {text}", file=sys.stderr, flush=True)
