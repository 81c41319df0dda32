"""`python -m ragtag.watch.feed --log FILE ...`: feeds other tools from a log that goes on, until told to stop.

The one idea: sinks run beside the training in a process of their own, so a tool that hangs hangs alone.
"""

import argparse
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from ragtag.watch.reader import Follower
from ragtag.watch.server import end_with_parent
from ragtag.watch.sinks import Sinks, sinks_of

_EVERY_S = 1.0


def feed(log: Path, sinks: Sinks, stopped: Callable[[float], bool]) -> None:
    """Pass on what is in `log` and what comes, until `stopped`, which waits for so many seconds, says True."""
    follower = Follower(log)
    ending = False
    while True:
        while events := follower.new(8 << 20):
            for event in events:
                sinks.take(event)
        if ending:
            break
        ending = stopped(_EVERY_S)
    sinks.close()


def main() -> None:
    """Feed until SIGTERM, and what is there then."""
    parser = argparse.ArgumentParser(prog="python -m ragtag.watch.feed", description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--tensorboard", type=Path)
    parser.add_argument("--prometheus", type=int)
    parser.add_argument("--wandb")
    given = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    end_with_parent()
    feed(given.log, sinks_of(tensorboard=given.tensorboard, prometheus=given.prometheus, wandb=given.wandb), stop.wait)


if __name__ == "__main__":
    main()
