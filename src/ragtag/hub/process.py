"""The hub's process: reads its arguments and its journal, takes the next epoch, serves until it is told to end.

The one idea: everything it must remember is in the run's directory, so it may be killed at any moment and started
again with the same arguments; the workers wait for it meanwhile.
"""

import argparse
import asyncio
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ragtag.core.errors import LaunchError, RagtagError, SettingError
from ragtag.hub.connection import check_token, server_tls
from ragtag.hub.door import Limits
from ragtag.hub.journal import FILE_NAME, Journal, JournalError
from ragtag.hub.rules import restore
from ragtag.hub.rules_state import JournalRecord, RunSettings
from ragtag.hub.server import HubServer, listen_on
from ragtag.watch.log_file import LogFile

SETTINGS_STATUS = 2
"""Exit status where the arguments, the token or the address are wrong; starting it again changes nothing."""
JOURNAL_STATUS = 74
"""Exit status where the journal is in use, damaged or cannot be written (EX_IOERR); nor does it then."""

_OTHER_FILES = 64
"""File handles that are left for everything but connections."""


def main(arguments: Sequence[str], *, version: str, environ: Mapping[str, str] = os.environ) -> int:
    """Run the hub until SIGTERM or Ctrl-C and return the exit status. Errors are printed, without a traceback."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="ragtag hub: %(message)s")
    level = logging.WARNING if options.quiet else logging.INFO if options.brief else logging.DEBUG
    logging.getLogger("ragtag.hub").setLevel(level)
    try:
        if not 0 < options.patience <= 86400:
            raise SettingError(f"--patience is {options.patience:g}. Expected seconds above 0, at most 86400.")
        token = environ.get("RAGTAG_TOKEN", "")
        check_token(token)
        settings = RunSettings(run=options.run, version=version, patience_s=options.patience)
        if options.again and not (options.run_dir / FILE_NAME).exists():
            raise JournalError(
                f"{options.run_dir / FILE_NAME} is gone, and with it who is in the run, so the run cannot go on. Start "
                f"it again; it continues from its last checkpoint, if it has one."
            )
        # First the journal: a second hub must learn of the first one's rather than of its port.
        with Journal[JournalRecord](options.run_dir, run=options.run, records=JournalRecord) as journal:
            state = restore(journal.records, settings)
            listener = _listener(options)
            with listener, LogFile(options.run_dir / "log.jsonl") as log_file:
                server = HubServer(
                    state=state,
                    journal=journal,
                    token=token,
                    limits=_limits(),
                    log_file=log_file,
                    outer=options.outer,
                    tls=server_tls(options.certificate, options.key),
                )
                asyncio.run(_serve(server, listener))
    except JournalError as error:
        print(f"ragtag hub: {error}", file=sys.stderr)
        return JOURNAL_STATUS
    except (LaunchError, SettingError) as error:
        print(f"ragtag hub: {error}", file=sys.stderr)
        return SETTINGS_STATUS
    except RagtagError as error:
        print(f"ragtag hub: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(server: HubServer, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.run(listener)


def _listener(options: argparse.Namespace) -> socket.socket:
    if options.fd is None:
        return listen_on(options.address, options.port)
    try:
        listener = socket.socket(fileno=options.fd)
        listener.listen(1024)
    except OSError as error:
        raise LaunchError(f"--fd {options.fd} is no bound socket: {error.strerror}.") from error
    return listener


def _limits() -> Limits:
    """As many workers as this process may have connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = Limits()
    wanted = limits.workers + limits.strangers + _OTHER_FILES
    if hard == resource.RLIM_INFINITY or hard > soft:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, max(soft, wanted))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    workers = min(limits.workers, max(16, soft - limits.strangers - _OTHER_FILES))
    return Limits(workers=workers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ragtag.hub",
        description="The hub of one run, which `ragtag launch` starts: who is in it, generation by generation.",
        epilog="The token that workers must carry is read from RAGTAG_TOKEN.",
    )
    parser.add_argument("--address", default="127.0.0.1", help="address of this machine to listen on")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--port", type=int, default=0, help="port to listen on; 0: any, it is printed")
    place.add_argument("--fd", type=int, help="a bound socket to listen on, inherited, instead")
    parser.add_argument("--run-dir", type=Path, required=True, help="where the run's journal lies")
    parser.add_argument("--again", action="store_true", help="it ran before, so its journal must be there")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--brief", action="store_true", help="print a line for each change of who trains, and no more")
    parser.add_argument("--quiet", action="store_true", help="print only what goes wrong")
    parser.add_argument("--outer", help="Unix socket of the process that merges what islands send")
    parser.add_argument("--certificate", type=Path, help="certificate chain (PEM), for TLS with all who connect")
    parser.add_argument("--key", type=Path, help="its private key (PEM); default: in the same file")
    parser.add_argument("--patience", type=float, default=30.0, help="patience_s, in seconds")
    return parser
