"""`python -m ragtag.watch --log FILE --fd N`: the page of one log, as a process; its token is in RAGTAG_TOKEN."""

import argparse
import os
import socket
from pathlib import Path

from ragtag.watch.server import end_with_parent, serve


def main() -> None:
    """Serve until the parent ends or says so."""
    parser = argparse.ArgumentParser(prog="python -m ragtag.watch", description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True, help="a socket that listens")
    given = parser.parse_args()
    token = os.environ.pop("RAGTAG_TOKEN", "")
    if not token:
        parser.error("RAGTAG_TOKEN is empty")
    end_with_parent()
    try:
        serve(given.log, socket.socket(fileno=given.fd), token)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
