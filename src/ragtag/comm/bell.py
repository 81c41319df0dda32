"""Wakes the one thread that waits for news, wherever it waits: on a condition, or in a selector.

The one idea: whoever has news rings; a condition hears it directly, a selector through one byte in a socket pair.
"""

import socket
import threading


class Bell:
    """A condition whose `ring` is also seen by a selector that watches `fileno()`."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self._heard, self._struck = socket.socketpair()
        self._rung = False

    def ring(self) -> None:
        """Wake the waiting thread; only while holding `condition`."""
        self.condition.notify_all()
        # One byte at most is under way, so that this can never block.
        if not self._rung:
            self._rung = True
            self._struck.send(b"\0")

    def hush(self) -> None:
        """Take note of all rings so far; call it before looking at the news."""
        with self.condition:
            if self._rung:
                self._heard.recv(1)
                self._rung = False

    def fileno(self) -> int:
        """What a selector watches for reading."""
        return self._heard.fileno()

    def close(self) -> None:
        """Let go of the sockets; conditions are notified still. May be called twice."""
        with self.condition:
            self._rung = True
            self._heard.close()
            self._struck.close()
