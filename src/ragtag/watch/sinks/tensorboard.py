"""TensorBoard's event files, written with its own package, which needs neither torch nor TensorFlow."""

from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from ragtag.watch.events import AnyEvent
from ragtag.watch.sinks.scalars import Scalars

_events: Any = event_pb2
_summaries: Any = summary_pb2


class TensorBoard:
    """Writes scalars to `directory`; look at them with `tensorboard --logdir`."""

    name = "TensorBoard"

    def __init__(self, directory: Path) -> None:
        self._scalars = Scalars()
        self._writer = EventFileWriter(str(directory))

    def take(self, event: AnyEvent) -> None:
        """Write what is a number over steps."""
        for name, step, value in self._scalars.of(event):
            summary = _summaries.Summary(value=[_summaries.Summary.Value(tag=name, simple_value=value)])
            self._writer.add_event(_events.Event(wall_time=event.t, step=step, summary=summary))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
