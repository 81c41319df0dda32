"""One process that reads samples, seen from both ends of its two pipes: tasks go in, samples come out, in order.

The one idea: samples travel as pickles whose large buffers (tensors, arrays) follow as raw bytes, so they need no
shared memory (containers have little), no file descriptor each, and are rebuilt without another copy.
"""

import contextlib
import dataclasses
import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any, BinaryIO

import numpy
import torch
from torch.utils.data._utils import worker as torch_worker

from ragtag.core.mixing import seed_for
from ragtag.runtime.randomness import seed_everything

# Smaller buffers ride inside the pickle: one more system call costs more than one more copy.
_SMALL_BUFFER_BYTES = 16 << 10
_HEAD = struct.Struct("<QI")
_PARENT_CHECK_S = 2.0
_CLOSE_S = 1.0


def read_samples(dataset: Any, epoch: int, indices: tuple[int, ...], seed: int | None) -> list[Any]:
    """Return `[dataset[i] for i in indices]`, each run seeded by (seed, epoch, i); `seed=None`: not seeded.

    Only unseeded reads use torch's `__getitems__`: it reads many samples under one state of the generators.
    """
    if seed is None and callable(getattr(dataset, "__getitems__", None)):
        return list(dataset.__getitems__(list(indices)))
    samples = []
    for index in indices:
        if seed is not None:
            seed_everything(seed_for(seed, epoch, index))
        samples.append(dataset[index])
    return samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception of user code in a worker: its traceback as text and, where it could be pickled, itself."""

    text: str
    error: bytes | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Write down `error`, which is being handled."""
        text = "".join(traceback.format_exception(error)).rstrip()
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # some can be written but not read back
        except Exception:
            return cls(text=text)
        return cls(text=text, error=pickled)

    def cause(self) -> BaseException | None:
        """The exception itself, if it can be rebuilt here."""
        with contextlib.suppress(Exception):
            return pickle.loads(self.error) if self.error else None


class Worker:
    """The parent's end. Tasks are answered in order, so `outstanding` says what the next answer is about.

    `on_answer(worker, answer)` and `on_end(worker)` are called on a thread of the worker's own, which runs from
    `start_receiving` (call it when all workers are forked) until the process ends.
    """

    def __init__(
        self,
        context: BaseContext,
        *,
        number: int,
        num_workers: int,
        dataset: Any,
        seed: int,
        seed_samples: bool,
        init_fn: Callable[[int], Any] | None,
        on_answer: Callable[["Worker", list[Any] | Failure], None],
        on_end: Callable[["Worker"], None],
    ) -> None:
        task_reader, self._tasks = context.Pipe(duplex=False)
        self._answers, answer_writer = context.Pipe(duplex=False)
        self._on_answer, self._on_end = on_answer, on_end
        self.outstanding: deque[Any] = deque()
        self.busy_since = 0.0
        self.ended = False
        arguments = (task_reader, answer_writer, dataset, seed, seed_samples, number, num_workers, init_fn)
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_work, args=arguments, name=f"ragtag-loader-{number}", daemon=True
        )
        self._process.start()
        # At the parent's exit multiprocessing would send SIGTERM, which the process leaves to its parent.
        self._process._popen.terminate = self._process._popen.kill
        task_reader.close()
        answer_writer.close()
        self._thread = threading.Thread(target=self._receive, name=f"ragtag-loader-{number}", daemon=True)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def start_receiving(self) -> None:
        """Begin to take answers off the pipe as they come."""
        self._thread.start()

    def send(self, task: Any, epoch: int, indices: tuple[int, ...]) -> None:
        """Queue `task`. Never blocks as long as the caller bounds `outstanding`: a pipe holds hundreds of tasks."""
        if not self.outstanding:
            self.busy_since = time.monotonic()
        self.outstanding.append(task)
        # A worker that has just died is noticed and named by the receiving thread.
        with contextlib.suppress(BrokenPipeError):
            write_message(self._tasks.fileno(), (epoch, indices))

    def poll(self) -> None:
        """Notice that the process has ended, even if something it started still holds its pipe open."""
        self.ended = self.ended or self._process.exitcode is not None

    def describe_end(self) -> str:
        """How the process ended, for an error message."""
        self._process.join(_CLOSE_S)
        code = self._process.exitcode
        if code is None or code >= 0:
            return f"ended by itself (exit code {code}); something in the dataset called exit"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if name == "SIGKILL":
            return f"was killed by {name}, most likely by the kernel because memory ran out: use fewer num_workers"
        return f"was killed by {name}"

    def ask_to_end(self) -> None:
        """Let the process end after the task it is at."""
        with contextlib.suppress(OSError):
            write_message(self._tasks.fileno(), None)

    def close(self) -> None:
        """Wait up to a second for the process to end as asked, then kill it; joins process and thread."""
        self._process.join(_CLOSE_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(_CLOSE_S)
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        self._tasks.close()
        # Still alive only if a process that the dataset started holds the pipe; closing it under its read is no good.
        if not self._thread.is_alive():
            self._answers.close()

    def _receive(self) -> None:
        with open(self._answers.fileno(), "rb", buffering=1 << 16, closefd=False) as reader:
            while True:
                try:
                    answer = read_message(reader)
                except PipeClosed:
                    break
                except Exception as error:  # whatever a user's class does when it is rebuilt
                    answer = Failure.of(error)
                self._on_answer(self, answer)
        self._on_end(self)


def _work(
    task_reader: Any,
    answer_writer: Any,
    dataset: Any,
    seed: int,
    seed_samples: bool,
    number: int,
    num_workers: int,
    init_fn: Callable[[int], Any] | None,
) -> None:
    """The worker's end: the whole life of the process."""
    # They reach the whole terminal, or process group: the parent decides, and may need samples until it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.freeze()  # what fork inherited is not ours to collect: no page copies, no finalizers of the parent's objects
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    own_seed = seed_for(seed, number, os.getpid())
    seed_everything(own_seed)
    failed_start = _start(dataset, own_seed, number, num_workers, init_fn)
    with open(task_reader.fileno(), "rb", buffering=1 << 16, closefd=False) as reader:
        try:
            while (task := read_message(reader)) is not None:
                answer = failed_start or _answer(dataset, task[0], task[1], seed if seed_samples else None)
                try:
                    write_message(answer_writer.fileno(), answer)
                except BrokenPipeError:
                    raise
                except Exception as error:  # the samples cannot be pickled; nothing has been written yet
                    write_message(answer_writer.fileno(), Failure.of(error))
        except (BrokenPipeError, PipeClosed):
            pass  # the parent is gone


def _start(
    dataset: Any, seed: int, number: int, num_workers: int, init_fn: Callable[[int], Any] | None
) -> Failure | None:
    # `torch.utils.data.get_worker_info`, which datasets and init functions ask.
    torch_worker._worker_info = torch_worker.WorkerInfo(  # type: ignore[call-arg]
        id=number, num_workers=num_workers, seed=seed, dataset=dataset
    )
    try:
        if init_fn is not None:
            init_fn(number)
    except Exception as error:
        return Failure.of(error)
    return None


def _answer(dataset: Any, epoch: int, indices: tuple[int, ...], seed: int | None) -> list[Any] | Failure:
    try:
        return read_samples(dataset, epoch, indices, seed)
    except BaseException as error:  # SystemExit too: a dataset does not end the run silently
        return Failure.of(error)


def _end_with_parent(parent_pid: int) -> None:
    """End at once when the parent does, in user code too: a dead rank's sockets must not live on in us."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while os.getppid() == parent_pid and not multiprocessing.connection.wait([parent.sentinel], _PARENT_CHECK_S):
        pass
    os._exit(1)


class PipeClosed(Exception):
    """The process at the other end of a pipe has closed it or died."""


class _Pickler(pickle.Pickler):
    """Pickles plain CPU tensors as buffers; all else as usual."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.device.type != "cpu":
            return NotImplemented
        if obj.requires_grad or obj.is_quantized or obj.is_conj() or obj.is_neg():
            return NotImplemented
        data = obj.contiguous().reshape(-1).view(torch.uint8).numpy().data if obj.numel() else b""
        return _tensor_from_buffer, (pickle.PickleBuffer(data), obj.dtype, tuple(obj.shape))


def _tensor_from_buffer(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(shape)


def write_message(descriptor: int, value: Any) -> None:
    """Write `value` to a pipe: lengths, pickle, then its large buffers."""
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _SMALL_BUFFER_BYTES:
            return True
        buffers.append(raw)
        return False

    body = io.BytesIO()
    _Pickler(body, protocol=5, buffer_callback=keep_inside).dump(value)
    lengths = struct.pack(f"<{len(buffers)}Q", *(raw.nbytes for raw in buffers))
    _write_all(descriptor, _HEAD.pack(body.tell(), len(buffers)) + lengths + body.getbuffer())
    for raw in buffers:
        _write_all(descriptor, raw)


def read_message(reader: BinaryIO) -> Any:
    """Read what `write_message` wrote, rebuilt around freshly allocated, writable buffers.

    Raises:
        PipeClosed: the other end is closed, or ended in the middle of a message.
    """
    body_bytes, num_buffers = _HEAD.unpack(_read_exactly(reader, _HEAD.size))
    lengths = struct.unpack(f"<{num_buffers}Q", _read_exactly(reader, 8 * num_buffers))
    body = _read_exactly(reader, body_bytes)
    buffers = [_read_exactly(reader, length) for length in lengths]
    return pickle.loads(body, buffers=buffers)


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


def _read_exactly(reader: BinaryIO, length: int) -> memoryview:
    data = numpy.empty(length, dtype=numpy.uint8).data  # unlike a bytearray, not cleared first
    if reader.readinto(data) != length:  # type: ignore[attr-defined]
        raise PipeClosed
    return data
