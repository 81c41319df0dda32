"""Ctrl-C and SIGTERM while checkpoints are kept: the process ends after a step, not in the middle of one.

The one idea: a signal only sets a flag, which travels on the ballot. A thread hears of it too, at once, even while the
training thread is inside a call that does not come back; it ends the process when no step boundary comes in time.
"""

import contextlib
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any

from ragtag.comm import process_exit
from ragtag.runtime.boundary import Boundary

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PIPE_VARIABLE = "RAGTAG_LAUNCHER_PIPE"
_BY_ITSELF_S = 2.0
"""How long the script may take to react when it is to end at once."""
_CLOSED = 0


class Stopped(SystemExit):
    """Ends the script of every rank, after the same step. Its status is 128 + the signal's number."""


class StopSignals:
    """Hears SIGINT and SIGTERM from `install` to `close`. A second SIGINT ends the script at once.

    SIGINT after a first SIGTERM is a first one too, where SIGTERM `is_for_one`: it asks for more.

    A handler that the script has set itself stays, and so does a signal that is ignored; that signal is not heard.

    Args:
        boundary: where the first signal is noted.
        patience_s: seconds from a signal to the boundary that follows.
        given_up: called on another thread than the training thread's when none has followed; tells people and ranks.
        leave: ends the process with a status where the script does not; tidier than what follows.
        numbers: which signals are heard.
        is_for_one: SIGTERM asks this process alone to end, SIGINT all of them.
    """

    def __init__(
        self,
        boundary: Boundary,
        patience_s: float,
        given_up: Callable[[signal.Signals], None],
        *,
        leave: Callable[[int], object] = process_exit.leave_at_once,
        numbers: Collection[int] = SIGNALS,
        is_for_one: bool = False,
    ) -> None:
        self._boundary, self._patience_s, self._given_up, self._leave = boundary, patience_s, given_up, leave
        self._numbers, self._is_for_one = numbers, is_for_one
        self._first = 0
        self._gives_up = self._reached = self._obeyed = False
        self._replaced: dict[int, Any] = {}
        self._previous_wakeup: int | None = None
        self._receiver, self._sender = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="ragtag-signals", daemon=True)

    def install(self) -> None:
        """Hear signals from now on; outside the main thread, where Python allows none, do nothing."""
        global _installed
        if threading.current_thread() is not threading.main_thread():
            return
        if _installed is not None:
            _installed._give_back()  # the newest trainer is the one that trains
        _installed = self
        self._sender.setblocking(False)
        for number, usual in zip(SIGNALS, (signal.default_int_handler, signal.SIG_DFL)):
            if number in self._numbers and signal.getsignal(number) is usual:
                self._replaced[number] = signal.signal(number, self._handle)
        self._previous_wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        if self._previous_wakeup != -1:
            signal.set_wakeup_fd(self._previous_wakeup)  # somebody else's; the handler tells the thread instead
        self._thread.start()

    def reached_boundary(self) -> None:
        """All ranks are between two steps, about to save and end: no hurry any more."""
        self._reached = True

    def close(self) -> None:
        """Give the signals back."""
        self._give_back()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._tell(_CLOSED)
            self._thread.join(timeout=_BY_ITSELF_S)
        self._receiver.close()
        self._sender.close()

    def _give_back(self) -> None:
        global _installed
        if _installed is not self:
            return
        _installed = None
        if self._previous_wakeup == -1:
            signal.set_wakeup_fd(-1)
        for number, handler in self._replaced.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._gives_up:
            raise Stopped(128 + self._first)
        if self._previous_wakeup != -1:
            self._tell(number)
        if self._is_news(self._first, number):
            self._first = self._boundary.stop = number
        elif number == signal.SIGINT:
            self._obeyed = True
            self._give_back()
            raise KeyboardInterrupt

    def _is_news(self, before: int, number: int) -> bool:
        """Whether a signal asks for something that the one `before` (0: none) has not asked for."""
        return not before or (self._is_for_one and before == signal.SIGTERM and number == signal.SIGINT)

    def _tell(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._sender.send(bytes([number]))

    def _watch(self) -> None:
        """The thread. The first signal starts the clock; a second SIGINT, or the end of patience, ends the process."""
        heard, end_s = 0, float("inf")
        while True:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                if not self._reached:
                    self._give_up(heard)
                    return
                end_s = left_s = float("inf")
            self._receiver.settimeout(None if left_s == float("inf") else left_s)
            try:
                content = self._receiver.recv(64)
            except TimeoutError:
                continue
            except OSError:
                return
            if not content or _CLOSED in content:
                return
            for number in filter(self._replaced.__contains__, content):
                if self._is_news(heard, number):
                    heard, end_s = number, time.monotonic() + self._patience_s
                    self._boundary.stop = number  # the training thread may be where its handler does not run
                elif number == signal.SIGINT:
                    time.sleep(_BY_ITSELF_S)
                    if not self._obeyed:
                        self._leave_now(number)
                    return

    def _give_up(self, number: int) -> None:
        self._gives_up, self._first = True, number
        _bounded(lambda: self._given_up(signal.Signals(number)))
        # A real signal, which interrupts what the training thread waits in.
        signal.pthread_kill(threading.main_thread().ident or 0, number)
        time.sleep(_BY_ITSELF_S)
        self._leave_now(number)

    def _leave_now(self, number: int) -> None:
        _bounded(lambda: self._leave(128 + number))
        os._exit(128 + number)


def _bounded(function: Callable[[], object]) -> None:
    """Call what may block, because the training thread may hold the lock of a stream or a log."""
    with contextlib.suppress(RuntimeError):  # no threads any more: the interpreter is ending already
        thread = threading.Thread(target=function, name="ragtag-last-words", daemon=True)
        thread.start()
        thread.join(timeout=_BY_ITSELF_S)


_installed: StopSignals | None = None


def _forget_in_child() -> None:
    """A child that was forked must neither hear signals for us nor send what it hears to our thread."""
    if _installed is not None:
        _installed._give_back()


os.register_at_fork(after_in_child=_forget_in_child)


def tell_launcher(environ: Mapping[str, str], patience_s: float) -> None:
    """Let `ragtag launch`, if that started this process, know how long a worker may take to end after a signal."""
    descriptor, _, inode = environ.get(PIPE_VARIABLE, "").partition(":")
    if not (descriptor.isdigit() and inode.isdigit()):
        return
    with contextlib.suppress(OSError):
        status = os.fstat(int(descriptor))
        # A script that starts another one may hand the variable on without the pipe.
        if stat.S_ISFIFO(status.st_mode) and status.st_ino == int(inode):
            os.write(int(descriptor), f"{patience_s}\n".encode())
