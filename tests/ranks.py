"""Runs a function as several ranks: real processes, real sockets, and the results or errors of each.

The one idea: a fork server has imported torch once, so a rank starts in milliseconds; nothing outlives the call.
"""

import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch

from ragtag.comm import process_exit
from ragtag.comm.group import Group
from ragtag.comm.rendezvous import connect
from ragtag.core.errors import PeerError

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RAGTAG_STORE_FD")
_context = multiprocessing.get_context("forkserver")
# pytest too: a child imports the main module of its parent.
# torch._dynamo is what the first optimizer imports, which takes a second.
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "pytest", "hypothesis", "ragtag.runtime.trainer", "tests.ranks"]
)


class RankDied(Exception):
    """A rank ended without a result: killed, or still running at the timeout (`exit_status` None)."""

    def __init__(self, message: str, exit_status: int | None = None) -> None:
        super().__init__(message, exit_status)
        self.exit_status = exit_status


def join(patience_s: float = 10.0) -> Group:
    """Connect this rank to the others, as the trainer does."""
    return connect(patience_s)


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    expect_failures: bool = False,
    wait_for: tuple[int, ...] | None = None,
) -> list[Any]:
    """Call `function(*args)`, importable from a test module, as `world_size` ranks; return its values by rank.

    A rank's error is raised here, the culprit's before those of its victims, with its traceback as a note. With
    `expect_failures` it stands in the list instead, RankDied for a rank that was killed. Only ranks in `wait_for`
    (None: all) are waited for; what is still running afterwards is killed.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
        processes = []
        for rank, (_, answer) in enumerate(pipes):
            environ = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            shared = listener if rank == 0 else None
            process = _context.Process(target=_run_rank, args=(environ, shared, answer, function, args), daemon=False)
            process.start()
            answer.close()
            processes.append(process)
    outcomes: list[tuple[str, Any] | None] = [None] * world_size
    try:
        open_pipes = {receiving: rank for rank, (receiving, _) in enumerate(pipes)}
        end_s = time.monotonic() + timeout
        while any(rank in (wait_for or range(world_size)) for rank in open_pipes.values()):
            readable = wait(list(open_pipes), timeout=max(0.0, end_s - time.monotonic()))
            if not readable:
                break
            for receiving in readable:
                assert isinstance(receiving, Connection)
                rank = open_pipes.pop(receiving)
                try:
                    outcomes[rank] = pickle.loads(receiving.recv_bytes())
                except EOFError:
                    processes[rank].join(5.0)
                    status = processes[rank].exitcode
                    outcomes[rank] = ("died", RankDied(f"rank {rank} died with exit status {status}", status))
        for rank, outcome in enumerate(outcomes):
            if outcome is None:
                outcomes[rank] = ("died", RankDied(f"rank {rank} was still running after {timeout:g} s"))
        for process in processes:
            if wait_for is None:
                process.join(max(0.5, min(10.0, end_s - time.monotonic())))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for receiving, _ in pipes:
            receiving.close()
    settled = [outcome for outcome in outcomes if outcome is not None]
    if not expect_failures:
        errors = [error for kind, error in settled if kind != "value"]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerError)):
            raise error
    return [value for _, value in settled]


def solo(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` in this process as a world of one: the reference."""
    alone = {name: value for name, value in os.environ.items() if name not in _LAUNCH_VARIABLES}
    with mock.patch.dict(os.environ, alone, clear=True):
        return function(*args)


def _run_rank(
    environ: dict[str, Any],
    listener: socket.socket | None,
    answer: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update({name: str(value) for name, value in environ.items()})
    if listener is not None:
        os.environ["RAGTAG_STORE_FD"] = str(listener.detach())
    torch.set_num_threads(1)
    try:
        outcome = pickle.dumps(("value", function(*args)))
    except BaseException as error:
        process_exit.report(error)
        outcome = _pickled(error)
    process_exit.finish()
    answer.send_bytes(outcome)
    answer.close()


def _pickled(error: BaseException) -> bytes:
    lines = "".join(traceback.format_exception(error))
    error = error.with_traceback(None)
    error.__cause__ = error.__context__ = None
    try:
        content = pickle.dumps(("error", error))
        pickle.loads(content)
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"in rank {os.environ['RANK']} (pid {os.getpid()}, {sys.executable}):\n{lines}")
    return pickle.dumps(("error", error))
