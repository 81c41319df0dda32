"""`ragtag launch`: one worker process per local device, and none left behind however the launch ends.

The one idea: the launcher owns no state a worker needs. It binds the port where they meet, starts them, passes on
output and signals, and when one fails gives the others a bounded time to end by themselves.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from ragtag.cli.devices import num_accelerators
from ragtag.cli.folding import Folding
from ragtag.cli.launch_plan import planned_run
from ragtag.cli.output import Output, write
from ragtag.cli.run_directory import log_environ
from ragtag.cli.views import Shown, Views
from ragtag.cli.worker_process import (
    PEER_FAILED_STATUS,
    ToldPatience,
    Worker,
    inherited,
    kill,
    say,
    signal_name,
    start_worker,
)
from ragtag.core.cluster_file import load_cluster
from ragtag.core.errors import SettingError
from ragtag.core.stages import text_from_stages
from ragtag.core.values import Stages

_POLL_S = 0.03
_HOLD_S = 8.0
"""How long a traceback of another rank than 0 may be held back, to see whether it is one that was shown already."""
_END_BY_THEMSELVES_S = 5.0
"""How long the others may go on after one worker failed; they normally end within a second."""
_INTERRUPT_S = 3.0
"""How long workers may take to end after Ctrl-C."""
_TERMINATE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to start: `command` follows the Python executable."""

    command: tuple[str, ...]
    num_workers: int
    shares: tuple[int, ...] | None = None
    all_output: bool = False
    logs: Path | None = None
    emulate: Path | None = None
    start_shares: tuple[int, ...] | None = None
    """Shares to begin with, which then follow speeds."""
    micro_batches: tuple[int | None, ...] | None = None
    """Most samples of one forward, by worker; None: as the script says."""
    recompute: tuple[bool, ...] = ()
    """By worker, whether it is to compute activations again in backward; empty: as the script says."""
    layout: str | None = None
    """What of the model's state is cut, as planned; None: as the script says."""
    slices: tuple[int, ...] = ()
    """Relative sizes of the slices, by worker."""
    stages: Stages = ()
    """Of a pipeline, as planned; empty: as the script says."""
    stage_micro_batch: int | None = None
    """Samples that pass a pipeline at a time, as planned."""
    checkpoint: str | None = None
    """Directory or URL for checkpoints; None: as the script says."""
    island: str | None = None
    """What this site is called among others, as said or planned; None: it is not one of several."""
    mode: str = ""
    """How islands merge, as planned; empty: as the script says."""


def request(
    *,
    script: str,
    arguments: tuple[str, ...] = (),
    num_workers: int | None = None,
    shares: str | None = None,
    all_output: bool = False,
    logs: Path | None = None,
    module: bool = False,
    emulate: Path | None = None,
    plan: Path | None = None,
    pin: bool = False,
    checkpoint: str | None = None,
    island: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Request:
    """Return what the words of the command line ask for.

    Raises:
        SettingError: a word is wrong; nothing was started.
    """
    planned = None
    if pin and plan is None:
        raise SettingError(
            "--pin keeps the shares of a plan: give --plan plan.json, or say the shares: --shares 8,5,3."
        )
    if plan is not None:
        if shares is not None:
            raise SettingError(f"--shares {shares} and --plan {plan} both say the shares. Leave one of them out.")
        planned = planned_run(plan, num_workers=num_workers, emulate=emulate, environ=environ, island=island)
        if pin and planned.island:
            raise SettingError(
                "--pin keeps shares, and those of a plan of islands are found while it trains. Leave it out."
            )
        num_workers, emulate = planned.num_workers, planned.emulate
    if emulate is not None:
        num_devices = len(load_cluster(emulate).expanded())
        if num_workers not in (None, num_devices):
            raise SettingError(f"--local {num_workers}, but {emulate} has {num_devices} devices. Leave --local out.")
        num_workers = num_devices
    if num_workers is None:
        num_workers = max(1, num_accelerators(environ))
    if num_workers < 1:
        raise SettingError(f"--local must be 1 or more workers, got {num_workers}: ragtag launch --local 2 {script}")
    if not module and not Path(script).is_file():
        raise SettingError(f"script {script!r} was not found in {Path.cwd()}. Options for ragtag come before it.")
    if module and not _is_module(script):
        raise SettingError(f"module {script!r} was not found; is it installed, or under {Path.cwd()}?")
    pinned = parse_shares(shares) if shares is not None else planned.shares if planned is not None and pin else None
    if pinned is not None and len(pinned) != num_workers:
        raise SettingError(
            f"--shares {shares} names {len(pinned)} shares, but there are {num_workers} workers: give one per "
            f"worker, or --local {len(pinned)}."
        )
    return Request(
        command=(*(("-m",) if module else ()), script, *arguments),
        num_workers=num_workers,
        shares=pinned,
        all_output=all_output,
        logs=logs,
        emulate=emulate,
        start_shares=(planned.shares or None) if planned is not None and not pin and not planned.stages else None,
        micro_batches=None if planned is None else planned.micro_batches,
        recompute=() if planned is None else planned.recompute,
        layout=None if planned is None else planned.layout,
        slices=() if planned is None else planned.slices,
        stages=() if planned is None else planned.stages,
        stage_micro_batch=None if planned is None else planned.stage_micro_batch,
        checkpoint=checkpoint,
        island=island if planned is None else planned.island or island,
        mode="" if planned is None else planned.mode,
    )


def parse_shares(text: str) -> tuple[int, ...]:
    """Return the shares that "8,5,3" names.

    Raises:
        SettingError: it is no list of whole numbers, 0 or more each and not all 0.
    """
    try:
        shares = tuple(int(share) for share in text.split(","))
    except ValueError:
        raise SettingError(f"--shares must be whole numbers separated by commas, like 8,5,3; got {text!r}.") from None
    if min(shares) < 0 or sum(shares) == 0:
        raise SettingError(f"--shares must be 0 or more each and not all 0; got {text}.")
    return shares


def launch_local(
    request: Request,
    directory: Path | None = None,
    shown: Shown | None = None,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Run the workers until all have ended; return the launch's exit status.

    Args:
        request: what to run.
        directory: where the run writes about itself; None: it does not.
        shown: what is shown of it; None: nothing.
        environ: of the launcher.

    0; the status of the first worker that failed by itself (128 + signal where one killed it); 130 or 143 after
    Ctrl-C or SIGTERM. Call from the main thread: signals are handled here.
    """
    make_log_directory(request)
    signals: list[int] = []

    def note_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    handlers = {number: signal.signal(number, note_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    workers: list[Worker] = []
    views = None
    told, folding = ToldPatience(), Folding("rank", write)
    try:
        views = Views(shown or Shown(page=False, quiet=True), directory, environ)
        _start(request, {**log_environ(directory), **environ}, workers, told, folding)
        return _follow(workers, signals, told, folding, views)
    finally:
        for worker in workers:
            kill(worker, signal.SIGKILL)
            worker.process.wait()
        _finish_output(workers, folding, interrupted=bool(signals))
        told.close()
        if views is not None:
            views.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def make_log_directory(request: Request) -> None:
    """Raise SettingError where workers' output cannot be written."""
    if request.logs is not None:
        try:
            request.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"--logs {request.logs}: {error.strerror}.") from None


def worker_environ(request: Request, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that all workers of `request` share."""
    shared = inherited(environ, request.num_workers)
    shared.update(LOCAL_WORLD_SIZE=str(request.num_workers), RAGTAG_LAUNCHED="1")
    if request.emulate is not None:
        shared["RAGTAG_EMULATE"] = str(request.emulate.resolve())
    if request.shares is not None:
        shared["RAGTAG_SHARES"] = ",".join(map(str, request.shares))
    if request.start_shares is not None:
        shared["RAGTAG_START_SHARES"] = ",".join(map(str, request.start_shares))
    if request.mode:
        shared["RAGTAG_MODE"] = request.mode
    if request.micro_batches is not None:
        sizes = ("none" if size is None else str(size) for size in request.micro_batches)
        shared["RAGTAG_START_MICRO_BATCH"] = ",".join(sizes)
    if any(request.recompute):
        shared["RAGTAG_START_RECOMPUTE"] = ",".join("yes" if each else "no" for each in request.recompute)
    if request.layout is not None:
        shared["RAGTAG_LAYOUT"] = request.layout
    if request.slices:
        shared["RAGTAG_SLICES"] = ",".join(map(str, request.slices))
    if request.stages:
        shared["RAGTAG_STAGES"] = text_from_stages(request.stages)
        shared["RAGTAG_MICRO_BATCH"] = str(request.stage_micro_batch)
    if request.checkpoint is not None:
        shared["RAGTAG_CHECKPOINT"] = request.checkpoint
    return shared


def _start(
    request: Request, environ: Mapping[str, str], workers: list[Worker], told: ToldPatience, folding: Folding
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        shared = worker_environ(request, environ) | {
            "WORLD_SIZE": str(request.num_workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "RAGTAG_LAUNCHER_PIPE": told.variable,
        }
        for rank in range(request.num_workers):
            mine = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            handed = (told.descriptor,)
            if rank == 0:
                mine["RAGTAG_STORE_FD"] = str(listener.fileno())
                handed += (listener.fileno(),)
            output = Output(rank=rank, all_output=request.all_output, logs=request.logs, folding=folding)
            workers.append(start_worker(request.command, rank=rank, environ=mine, output=output, pass_fds=handed))
    # Threads only now: forking with threads around may deadlock the child.
    for worker in workers:
        worker.output.follow(worker.process)


def _follow(workers: list[Worker], signals: list[int], told: ToldPatience, folding: Folding, views: Views) -> int:
    """Return the exit status once every worker has ended; at most a bounded time after a failure or a signal."""
    patience_s = 0.0
    failed: list[Worker] = []
    asked_s: float | None = None
    asked_by = 0
    limit_s = _END_BY_THEMSELVES_S
    running = list(workers)
    while running:
        for worker in [worker for worker in running if worker.process.poll() is not None]:
            running.remove(worker)
            if worker.process.returncode != 0 and not worker.stopped_by_us:
                failed.append(worker)
        now_s = time.monotonic()
        if signals and not asked_by:
            # One patience to the end of a step, and one more to write what all hold.
            patience_s = told.longest_s
            asked_by, asked_s, limit_s = signals[0], now_s, _INTERRUPT_S + 2 * patience_s
            if patience_s:
                say(f"{signal.Signals(asked_by).name}: ending with a checkpoint; Ctrl-C (again) ends at once")
            for worker in running:
                # Without checkpoints nothing is gained by ending at once in another way than by Ctrl-C.
                worker.process.send_signal(asked_by if patience_s else signal.SIGINT)
        elif failed and asked_s is None:
            asked_s = now_s
        # Where checkpoints are kept, whoever evicts may well send SIGTERM again and again.
        impatient = signal.SIGINT in signals[1:] or (len(signals) > 1 and not patience_s)
        if asked_s is not None and running and (impatient or now_s - asked_s >= limit_s):
            hard = impatient or now_s - asked_s >= limit_s + _TERMINATE_S
            for worker in running:
                if hard or not worker.stopped_by_us:
                    worker.stopped_by_us = True
                    kill(worker, signal.SIGKILL if hard else signal.SIGTERM)
        for worker in running:
            worker.output.show_held(older_than_s=_HOLD_S)
        folding.show()
        views.look()
        time.sleep(_POLL_S)
    _finish_output(workers, folding, interrupted=bool(asked_by))
    if asked_by:
        say(f"stopped by {signal.Signals(asked_by).name}; all {len(workers)} workers have ended")
        return 128 + asked_by
    if not failed:
        return 0
    culprit = next((worker for worker in failed if worker.process.returncode != PEER_FAILED_STATUS), failed[0])
    stopped = [str(worker.rank) for worker in workers if worker.stopped_by_us]
    rest = f"; rank {', '.join(stopped)} did not end by itself and was killed" if stopped else ""
    status = culprit.process.returncode
    if status < 0:
        say(f"rank {culprit.rank} (pid {culprit.process.pid}) was killed by {signal_name(-status)}{rest}")
        return 128 - status
    say(f"rank {culprit.rank} (pid {culprit.process.pid}) ended with status {status}{rest}")
    return status


def _finish_output(workers: list[Worker], folding: Folding, *, interrupted: bool) -> None:
    """Pass on the rest, and show the tracebacks that were held back, each distinct one once; after Ctrl-C none."""
    for worker in workers:
        worker.output.finish()
    folding.show(everything=True)
    seen = set()
    own_terminal = False
    for worker in workers:
        output, failed = worker.output, worker.process.returncode not in (0, PEER_FAILED_STATUS)
        if worker.rank == 0 and failed:
            seen.add(output.last_error)
            own_terminal = output.stderr is None
        if output.holds and not interrupted and output.last_error not in seen:
            if own_terminal:  # rank 0's own words are not known here and most likely were the same
                say(f"rank {worker.rank} ended with {output.last_error}")
            else:
                output.show_held()
            seen.add(output.last_error)
        output.forget_held()


def _is_module(name: str) -> bool:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]
