"""What a process does when its script ends: tell the other ranks, print once, leave with the right status.

The one idea: an exception anywhere in the user's script reaches every rank, and a person reads it once: the rank
where it happened prints its traceback, other ranks of that host print nothing, other hosts print one line.
"""

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from ragtag.comm.group import Group
from ragtag.comm.judge import described
from ragtag.core.errors import PeerError, RagtagError

PEER_FAILED_STATUS = 75
"""Exit status of a rank that only ends because another one did (EX_TEMPFAIL), so that a launcher finds the culprit."""
EVICTED_STATUS = 76
"""Exit status of a worker that the others gave up, so that a launcher starts another one in its place."""
HUB_LOST_STATUS = 77
"""Exit status of a worker that could not reach its run's hub any more, so that a launcher waits until it can."""
INTERRUPTED_STATUS = 130
"""Exit status after Ctrl-C, as shells give it."""

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_guarded: list[Group] = []
_last: Group | None = None
"""A group that was closed because of an error on its way out of the script, and that says how the script ends."""
_previous_hook: ExceptHook | None = None
_previous_exit: Callable[..., NoReturn] | None = None
_asked_status: int | None = None
"""The status of the last `sys.exit` that asked for one other than 0."""
_raised_status: int | None = None
"""The status of the exception that ends the script."""
_stuck = False


def guard(group: Group, *, always: bool = False) -> None:
    """From now on tell `group` how this script ends. A world of one has nobody to tell and is left alone, unless
    `always`: others may join it."""
    global _previous_hook, _previous_exit, _asked_status, _last
    if group.world_size == 1 and not always:
        return
    _last = None
    _asked_status = None
    if _previous_hook is None:
        _previous_hook, sys.excepthook = sys.excepthook, _except_hook
        # Nothing else tells, at exit, that the script asked for a status; SystemExit passes no hook.
        _previous_exit, sys.exit = sys.exit, _recording_exit
        atexit.register(finish)
    _guarded.append(group)


def closing_with_error(group: Group) -> None:
    """`group` is about to be closed because of an error: if that ends the script, it is printed as it would be were the
    group open."""
    global _last
    if any(each is group for each in _guarded):
        _last = group


def release(group: Group) -> None:
    """Stop telling `group`, because it was closed; the last one gives the hooks back, but for an error on its way."""
    global _previous_hook, _previous_exit
    _guarded[:] = [other for other in _guarded if other is not group]
    if not _guarded and _last is None and _previous_hook is not None and _previous_exit is not None:
        if sys.excepthook is _except_hook:
            sys.excepthook = _previous_hook
        if sys.exit is _recording_exit:
            sys.exit = _previous_exit
        _previous_hook = _previous_exit = None
        atexit.unregister(finish)


def report(error: BaseException) -> None:
    """Tell all guarded groups that this rank's script ends with `error`, and note on it where that happened."""
    found_by_all = isinstance(error, RagtagError) and error.origin_rank is not None
    for group in _guarded or filter(None, [_last]):
        if not found_by_all:
            group.announce_failure(error, group.doing)
        if not isinstance(error, PeerError):
            doing = f", {group.doing}" if group.doing else ""
            error.add_note(f"[ragtag] on rank {group.rank} ({group.hosts[group.rank]}), step {group.step}{doing}")


def expect_stuck_thread() -> None:
    """At the end of the script leave at once: a daemon thread may still be inside a network call."""
    global _stuck
    _stuck = True


def ending_with(status: int) -> None:
    """The script is about to end with `status` on every rank alike, so that no rank has to tell the others."""
    global _raised_status
    _raised_status = status


def leave_at_once(status: int) -> NoReturn:
    """End the process now, from any thread, without exit handlers or the interpreter's teardown."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)


def finish() -> None:
    """Say goodbye to all guarded groups, and release them."""
    for group in tuple(_guarded):
        if _asked_status is not None and _raised_status is None:
            group.announce_failure(SystemExit(_asked_status), group.doing)
        if not group.close():
            expect_stuck_thread()
        release(group)


def what_to_print(error: BaseException, group: Group) -> str:
    """Return which part of `error` this rank prints: "all" of it, one "line", or "nothing".

    An error that all ranks raise is printed by its `origin_rank`, and in one line by the first rank of other hosts. The
    same mistake made on every rank is printed by the rank that was first to tell the others.
    """
    if isinstance(error, KeyboardInterrupt):
        return "nothing"
    origin = error.origin_rank if isinstance(error, RagtagError) else None
    if origin is None and (failure := group.failure) is not None and described(error) in str(failure):
        origin = failure.rank
    if origin is None or origin == group.rank:
        return "all"
    host = group.hosts[group.rank]
    elsewhere = not 0 <= origin < len(group.hosts) or host != group.hosts[origin]
    if elsewhere and group.hosts.index(host) == group.rank:
        return "line"
    return "nothing"


def _except_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    global _raised_status
    group = _guarded[-1] if _guarded else _last
    if group is None or _previous_hook is None:  # a hook of somebody else's has kept this one
        sys.__excepthook__(kind, error, trace)
        return
    if threading.current_thread() is threading.main_thread():
        # A further Ctrl-C ends the process at once instead of adding a traceback to this one.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    status = getattr(error, "exit_status", None)
    if isinstance(error, KeyboardInterrupt):
        _raised_status = INTERRUPTED_STATUS
    elif status is not None:
        _raised_status = status
    elif isinstance(error, PeerError) and error.origin_rank != group.rank:
        _raised_status = PEER_FAILED_STATUS
    else:
        _raised_status = 1
    try:
        report(error)
    finally:
        printed = "short" if status is not None else what_to_print(error, group)
        if printed == "all":
            _previous_hook(kind, error, trace)
        elif printed == "short":
            print(f"ragtag: {error}", file=sys.stderr)
        elif printed == "line":
            print(f"ragtag: rank {group.rank}: {type(error).__name__}: {error}", file=sys.stderr)
    if _raised_status != 1:
        raise SystemExit(_raised_status)


def _recording_exit(status: object = None, /) -> NoReturn:
    global _asked_status
    _asked_status = (status if isinstance(status, int) else 1) if status else None
    raise SystemExit(status)


def _leave_at_once() -> None:
    """End the process without tearing down the interpreter, if a thread is still inside a network call.

    Such a thread would wake up in the middle of the teardown and abort the process.
    """
    if not _stuck:
        return
    status = _raised_status if _raised_status is not None else _asked_status
    if status is None and hasattr(sys, "last_value"):
        status = 1  # An exception was printed that no hook of ours saw: no group had been formed.
    leave_at_once(status or 0)


# Exit handlers run last in, first out: registered at import, this one runs after those of the user's script.
atexit.register(_leave_at_once)
