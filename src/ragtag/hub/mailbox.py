"""Where a worker's frames lie until the thread that waits for them takes them out.

The one idea: a wait ends by a frame, by its time, or because nothing will arrive any more; it never hangs.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ragtag.core.errors import RagtagError
from ragtag.hub.frames import Frame, FromHub

F = TypeVar("F", bound=Frame)

QUEUE_LIMIT = 256
"""Frames kept in either direction; beyond it the oldest, which later ones have overtaken, are dropped."""


class Mailbox:
    """Frames that have arrived, kept for a thread that waits for some of them."""

    def __init__(self, on_frame: Callable[[FromHub], None] | None = None) -> None:
        self.error: RagtagError | None = None
        """Why nothing will arrive any more."""
        self._on_frame = on_frame
        self._frames: deque[FromHub] = deque(maxlen=QUEUE_LIMIT)
        self._changed = threading.Condition()

    def put(self, frame: FromHub) -> None:
        """Keep a frame and hand it to `on_frame`, on the calling thread."""
        with self._changed:
            self._frames.append(frame)
            self._changed.notify_all()
        if self._on_frame is not None:
            self._on_frame(frame)

    def fail(self, error: RagtagError) -> None:
        """Nothing will arrive any more."""
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def wait(self, *kinds: type[F], timeout_s: float) -> F | None:
        """Take the oldest frame of one of `kinds`, leaving all others; None: none came within `timeout_s` seconds.

        Raises:
            RagtagError: nothing will arrive any more.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for place, frame in enumerate(self._frames):
                    if isinstance(frame, kinds):
                        del self._frames[place]
                        return frame
                if self.error is not None:
                    raise self.error
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
