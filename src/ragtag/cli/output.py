"""Where a worker's output goes: to the terminal, with a prefix, to a log, or nowhere.

The one idea: rank 0 writes to the terminal itself, so that progress bars work; what others say is passed on in whole
lines by one thread per pipe.
"""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, BinaryIO

from ragtag.cli.folding import Folding


class Output:
    """The output of one worker. Give `stdout` and `stderr` to Popen, then call `follow`, and `finish` at the end.

    Args:
        rank: of the worker, or its place on this machine; what 0 says bears no prefix.
        all_output: show the standard output of all, not only of 0.
        logs: where to write it as well; None: nowhere.
        name: what stands in the prefix and the log's name instead of the rank, for one of several that follow each
            other in the same place: they share a log, and even the tracebacks of 0 are held back.
        said: what ragtag itself has said on this machine; each of its lines is shown once, whichever workers say it.
        folding: where lines of several workers that are alike become one; None: each is shown at once.
    """

    def __init__(
        self,
        *,
        rank: int,
        all_output: bool,
        logs: Path | None,
        name: str | None = None,
        said: set[bytes] | None = None,
        folding: Folding | None = None,
    ) -> None:
        piped = subprocess.PIPE
        self._number, self._folding = rank, folding if rank > 0 else None
        self._prefix = f"[{name or f'rank {rank}'}] ".encode() if rank > 0 else b""
        self._holds_back = rank > 0 or name is not None
        self._said = said
        self._log: BinaryIO | None = None
        if logs is not None:
            file = logs / f"{(name or f'rank {rank}').replace(' ', '-')}.log"
            self._log = open(file, "wb" if name is None else "ab")  # noqa: SIM115
        self._shows_stdout = rank == 0 or all_output
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._held: list[bytes] = []
        self._held_since_s = 0.0
        self._tracing = False
        self.last_error = ""
        """The last line of the last traceback, if it could be read."""
        if rank == 0:
            self.stdout = None if logs is None else piped
            # On a terminal it writes there itself; elsewhere its last words are compared with the others'.
            self.stderr = None if logs is None and name is None and sys.stderr.isatty() else piped
        else:
            self.stdout = piped if self._shows_stdout or logs is not None else subprocess.DEVNULL
            self.stderr = piped

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Start passing on what `process` writes."""
        shown_out = sys.stdout.buffer if self._shows_stdout else None
        for pipe, shown in ((process.stdout, shown_out), (process.stderr, sys.stderr.buffer)):
            if pipe is not None:
                thread = threading.Thread(target=self._pass_on, args=(pipe, shown), daemon=True)
                thread.start()
                self._threads.append(thread)

    def finish(self) -> None:
        """Wait, bounded, until all that was written has been passed on; the process has ended."""
        for thread in self._threads:
            thread.join(timeout=1.0)
        if self._log is not None:
            with self._lock:
                self._log.close()
                self._log = None

    def show_held(self, *, older_than_s: float = 0.0) -> None:
        """Show a traceback that was held back, unless it is younger than that."""
        with self._lock:
            if self._held and time.monotonic() - self._held_since_s >= older_than_s:
                write(sys.stderr.buffer, b"".join(self._held))
                self._held.clear()

    def forget_held(self) -> None:
        """Drop a traceback that was held back."""
        with self._lock:
            self._held.clear()

    @property
    def holds(self) -> bool:
        """Whether a traceback is held back."""
        return bool(self._held)

    def _pass_on(self, pipe: IO[bytes], shown: BinaryIO | None) -> None:
        rest = b""
        while content := os.read(pipe.fileno(), 1 << 16):
            # A progress bar ends its lines with a carriage return.
            *lines, rest = re.split(rb"(?<=[\r\n])", rest + content)
            self._pass_on_lines(lines, shown)
        if rest:
            self._pass_on_lines([rest + b"\n"], shown)
        pipe.close()

    def _pass_on_lines(self, lines: list[bytes], shown: BinaryIO | None) -> None:
        with self._lock:
            seen = self._hold_traceback(lines) if shown is sys.stderr.buffer else lines
        if shown is not None and seen:
            self._show(seen, shown)
        with self._lock:
            if self._log is not None:
                self._log.write(b"".join(lines))
                self._log.flush()

    def _show(self, lines: list[bytes], shown: BinaryIO) -> None:
        if self._folding is None:
            write(shown, b"".join(self._prefix + line for line in lines))
            return
        for line in lines:
            self._folding.say(self._number, line, shown)

    def _hold_traceback(self, lines: list[bytes]) -> list[bytes]:
        """Return what is shown at once; where tracebacks are held back, what follows the start of one waits."""
        seen = []
        for line in lines:
            if self._said is not None and line.startswith(b"ragtag: "):
                if line in self._said:
                    continue
                self._said.add(line)
            if line.startswith(b"Traceback (most recent call last)"):
                self._tracing = True
                if self._holds_back and not self._held:
                    self._held_since_s = time.monotonic()
                    self._held.append(b"")
            elif self._tracing and re.match(rb"[A-Za-z_][\w.]*(:|$)", line):
                self.last_error = line.decode(errors="replace").strip()
            if self._held:
                self._held.append(self._prefix + line)
            else:
                seen.append(line)
        return seen


def write(shown: BinaryIO, content: bytes) -> None:
    """Show it, if anybody still reads."""
    try:
        shown.write(content)
        shown.flush()
    except (BrokenPipeError, ValueError):
        pass  # Nobody reads any more; the workers go on.
