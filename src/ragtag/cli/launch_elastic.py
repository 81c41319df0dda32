"""`ragtag launch` of a run whose machines come and go: a supervisor of this machine's workers, and of the hub.

The one idea: the supervisor knows nothing of the training. It starts a process again that was killed, and leaves alone
one that ended by itself; who takes part in the next step is between the workers and the hub.
"""

import os
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType

from ragtag.cli.elastic_request import Elastic
from ragtag.cli.folding import Folding
from ragtag.cli.hub_process import HubProcess
from ragtag.cli.hub_question import HubGone, HubUnreachable, ask
from ragtag.cli.launch import Request, make_log_directory, worker_environ
from ragtag.cli.outer_process import OuterProcess
from ragtag.cli.output import Output, write
from ragtag.cli.run_directory import make_run_directory
from ragtag.cli.views import Shown, Views
from ragtag.cli.worker_process import PEER_FAILED_STATUS, ToldPatience, Worker, kill, say, signal_name, start_worker
from ragtag.core.errors import LaunchError, SettingError
from ragtag.core.hub_address import hub_address, is_loopback

_POLL_S = 0.03
_EVICTED_STATUS, _HUB_LOST_STATUS = 76, 77
"""As `comm.process_exit`: the others gave this worker up; it gave the hub up."""
_STOPPED = (130, 143)
"""Statuses of workers that end because they were told to."""
_LEFT_STATUS = 143
"""SIGTERM is for one worker, and the others go on; SIGINT ends all together, with a checkpoint."""
_RESTARTS, _WITHIN_S = 5, 600.0
"""A worker that dies more often than that within this time is not started again."""
_PAUSE_S = 0.5
_INTERRUPT_S = 4.0
_END_BY_THEMSELVES_S = 5.0
"""How long this machine's others may go on after a script failed; where the run ends, they know within a second."""
_TERMINATE_S = 1.0
_HOLD_S = 8.0
_ASK_EVERY_S, _ASK_S = 1.0, 5.0
_AWAY = 10
"""Multiples of the patience for which a machine waits for a hub that cannot be reached."""


@dataclass(kw_only=True)
class _Place:
    """One worker after another."""

    number: int
    environ: dict[str, str]
    worker: Worker | None = None
    deaths_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RESTARTS))
    num_started: int = 0
    start_at_s: float = 0.0
    awaits_hub: bool = False
    status: int | None = None
    """How the last worker ended, once no other is to follow."""


def launch_elastic(
    request: Request, elastic: Elastic, shown: Shown | None = None, environ: Mapping[str, str] = os.environ
) -> int:
    """Supervise the workers, and the hub where it is this machine's, until the run is over; return the exit status.

    0: a script here has run to its end. 75: the run ended because of another machine. 130 or 143: Ctrl-C or SIGTERM.
    Else the status of a worker whose script failed, or 128 + the signal where all were killed again and again. Call
    from the main thread: signals are handled here.

    Raises:
        SettingError, LaunchError: nothing was started.
    """
    if request.shares is not None:
        raise SettingError(
            "--shares and --pin fix the split over fixed workers; here workers come and go. Leave them out (shares "
            "follow measured speed), or --elastic, --address, --port, --token and --hub."
        )
    make_log_directory(request)
    supervisor = _Supervisor(request, elastic, shown or Shown(page=False), environ)
    handlers = {number: signal.signal(number, supervisor.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        supervisor.start()
        return supervisor.follow()
    finally:
        supervisor.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _Supervisor:
    def __init__(self, request: Request, elastic: Elastic, shown: Shown, environ: Mapping[str, str]) -> None:
        self._request, self._elastic, self._shown, self._environ = request, elastic, shown, environ
        self._views: Views | None = None
        self._signals: list[int] = []
        self._asked_s: float | None = None
        """When the workers were told to end."""
        self._limit_s = 0.0
        self._failed_s: float | None = None
        """When a script failed, because of which this machine's workers all end."""
        self._away_s: float | None = None
        """Since when the hub of another machine has not been reached."""
        self._ask_at_s = 0.0
        self._stopped_elsewhere = False
        self._places: list[_Place] = []
        self._hub: HubProcess | None = None
        self._outer: OuterProcess | None = None
        self._told = ToldPatience()
        self._said: set[bytes] = set()
        self._folding = Folding("worker", write)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal; `follow` acts on it."""
        self._signals.append(number)

    def start(self) -> None:
        """Start the hub, if it is ours; the workers follow."""
        elastic, request = self._elastic, self._request
        if elastic.hub is None:
            if elastic.outer is not None:
                ask(elastic.outer, elastic.token, timeout_s=_ASK_S)
            directory = make_run_directory(elastic.directory)
            merges = elastic.island is not None and elastic.outer is None
            if merges:
                self._outer = OuterProcess(
                    run=elastic.run,
                    directory=directory,
                    patience_s=elastic.patience_s,
                    environ=self._environ,
                    quiet=self._shown.quiet,
                )
                self._outer.start()
            self._hub = HubProcess(
                address=elastic.address,
                port=elastic.port,
                token=elastic.token,
                run=elastic.run,
                directory=directory,
                patience_s=elastic.patience_s,
                environ=self._environ,
                quiet=self._shown.quiet,
                outer=None if self._outer is None else self._outer.path,
                certificate=elastic.certificate,
                key=elastic.key,
                island=elastic.island,
            )
            self._hub.start()
            if not self._shown.quiet:
                self._hub.say_how_to_join(request.command)
            self._views = Views(self._shown, directory, self._environ)
            hub = self._hub.at
        else:
            hub = elastic.hub
            health = ask(hub, elastic.token, timeout_s=_ASK_S)
            if health.end:
                raise LaunchError(f"The run at {hub} is over: {health.end}")
            self._check_reachable(hub, {member.host for member in health.members})
            say(f"joining the run at {hub}, of {len(health.members)} workers so far")
        shared = worker_environ(request, self._environ)
        # Sizes of slices follow the memory of whoever is there.
        for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RAGTAG_SLICES"):
            shared.pop(name, None)
        if elastic.hub is not None:
            # What a plan begins with is for a first generation, and Ctrl-C on a guest is for this machine alone.
            for name in ("RAGTAG_START_SHARES", "RAGTAG_START_MICRO_BATCH", "RAGTAG_START_RECOMPUTE"):
                shared.pop(name, None)
            shared["RAGTAG_GUEST"] = "1"
        shared.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost store is ours to tell, in one line
        shared |= {
            "RAGTAG_HUB": hub,
            "RAGTAG_TOKEN": elastic.token,
            "RAGTAG_RUN": elastic.run,
            "RAGTAG_LAUNCHER_PIPE": self._told.variable,
        }
        self._connect_islands(shared, hub)
        for number in range(request.num_workers):
            mine = {"RANK": str(number), "LOCAL_RANK": str(number), "RAGTAG_WORKER": f"{self._host}/{number}"}
            self._places.append(_Place(number=number, environ=shared | mine))

    def _connect_islands(self, shared: dict[str, str], hub: str) -> None:
        """Tell workers which TLS their hub has, and where islands are merged, if this is one."""
        elastic, trusted = self._elastic, "" if self._hub is None else self._hub.trusted
        if self._hub is not None:
            elsewhere = shared.pop("RAGTAG_TLS", "")  # of the site that has started the run
            shared |= {"RAGTAG_TLS": trusted} if trusted else {}
            if elastic.island is not None:
                shared |= {"RAGTAG_OUTER": elastic.outer or hub, "RAGTAG_ISLAND": elastic.island}
                shared["RAGTAG_OUTER_TLS"] = trusted if elastic.outer is None else elsewhere

    def _check_reachable(self, hub: str, hosts: set[str]) -> None:
        """Workers listen where their connection to the hub begins, so through a tunnel others would not reach them."""
        others = sorted(hosts - {self._host})
        if others and is_loopback(hub_address(hub)[0]):
            raise LaunchError(
                f"{hub} is an address inside this machine ({self._host}), but the run's workers are on "
                f"{', '.join(others)}, which could not reach workers here. Start the run there with --address and an "
                f"address that this machine reaches, without a tunnel, and type the line that it prints."
            )

    @property
    def _host(self) -> str:
        return self._environ.get("RAGTAG_HOSTNAME") or socket.gethostname()

    def follow(self) -> int:
        """Return the exit status once no worker runs or is to be started, and the hub has ended."""
        while any(place.status is None for place in self._places):
            now_s = time.monotonic()
            if self._hub is not None:
                self._hub.look_after()
            if self._outer is not None:
                self._outer.look_after()
            self._ask_for_hub(now_s)
            for place in self._places:
                if place.status is None:
                    self._look_after(place, now_s)
            self._end_workers(now_s)
            self._folding.show()
            if self._views is not None:
                self._views.look()
            time.sleep(_POLL_S)
        self._folding.show(everything=True)
        if self._signals:
            who = "all" if self._elastic.hub is None else "this machine has left the run;"
            say(f"stopped by {signal_name(self._signals[0])}; {who} {len(self._places)} workers have ended")
            return 128 + self._signals[0]
        status = _of_all([place.status or 0 for place in self._places])
        if status == PEER_FAILED_STATUS and self._hub is not None and self._hub.ended:
            return 1  # this machine's hub, and nobody else's fault
        if self._hub is not None and self._failed_s is None and status != PEER_FAILED_STATUS:
            outer = self._outer
            self._hub.await_end(self._signals, (lambda: False) if outer is None else outer.look_after)
        return status

    def _start_worker(self, place: _Place) -> None:
        output = Output(
            rank=place.number,
            all_output=self._request.all_output,
            logs=self._request.logs,
            name=f"worker {place.number}",
            said=self._said,
            folding=self._folding,
        )
        place.worker = start_worker(
            self._request.command,
            rank=place.number,
            environ=place.environ,
            output=output,
            pass_fds=(self._told.descriptor,),
        )
        place.num_started += 1
        output.follow(place.worker.process)

    def _look_after(self, place: _Place, now_s: float) -> None:
        """Start the worker of this place, or see how it has ended."""
        worker = place.worker
        ending = self._asked_s is not None or self._failed_s is not None
        if worker is None:
            if ending:
                place.status = _EVICTED_STATUS
            elif not place.awaits_hub and now_s >= place.start_at_s:
                self._start_worker(place)
            return
        status = worker.process.poll()
        worker.output.show_held(older_than_s=_HOLD_S)
        if status is None:
            return
        place.worker = None
        kill(worker, signal.SIGKILL)  # loader workers of one that was killed
        worker.output.finish()
        self._folding.show(everything=True)
        self._show_last_words(worker, status)
        if ending or worker.stopped_by_us:
            place.status = status
        elif status < 0 or status == _EVICTED_STATUS:
            self._died(place, worker, status, now_s)
        elif status == _HUB_LOST_STATUS:
            place.awaits_hub = True
        else:
            self._ended(place, worker, status, now_s)

    def _died(self, place: _Place, worker: Worker, status: int, now_s: float) -> None:
        place.deaths_s.append(now_s)
        evicted = status == _EVICTED_STATUS
        how = "was given up by the others" if evicted else f"was killed by {signal_name(-status)}"
        title = f"worker {place.number} (pid {worker.process.pid}) {how}"
        if len(place.deaths_s) == _RESTARTS and now_s - place.deaths_s[0] < _WITHIN_S:
            hint = "why stands above" if evicted else "where the system killed it for memory, `dmesg` says so"
            within_s = now_s - place.deaths_s[0]
            say(f"{title}, and {_RESTARTS} times within {within_s:.0f} s it ended like this: it stays away; {hint}")
            place.status = status
            return
        if not evicted:  # which it has said itself, with the reason
            say(f"{title}; starting another one")
        # Longer each time, since whoever joins and fails holds the others up.
        place.start_at_s = now_s + _PAUSE_S * (2 ** (len(place.deaths_s) - 1) - 1)

    def _ended(self, place: _Place, worker: Worker, status: int, now_s: float) -> None:
        """Its script has ended, one way or the other."""
        place.status = status
        if status == _LEFT_STATUS:
            say(f"worker {place.number} (pid {worker.process.pid}) was told by SIGTERM to leave, and has")
            return
        if status in _STOPPED:
            place.status = PEER_FAILED_STATUS
            if not self._stopped_elsewhere:
                say(f"the run was stopped by {signal_name(status - 128)} on another machine")
            self._stopped_elsewhere = True
        if status in (0, PEER_FAILED_STATUS, *_STOPPED):
            return
        say(f"worker {place.number} (pid {worker.process.pid}) ended with status {status}")
        if place.num_started == 1:
            self._failed_s = now_s
        # One that came in place of another may fail alone; where it had joined, the others know.

    def _show_last_words(self, worker: Worker, status: int) -> None:
        """A traceback is shown once on this machine, and none after Ctrl-C or where another worker has failed."""
        output, key = worker.output, worker.output.last_error.encode()
        if status == PEER_FAILED_STATUS or self._signals or key in self._said:
            output.forget_held()
        elif output.holds:
            output.show_held()
            self._said.add(key)

    def _end_workers(self, now_s: float) -> None:
        """After a signal, or a script's failure, give workers a bounded time to end by themselves."""
        running = [place.worker for place in self._places if place.worker is not None]
        if self._signals and self._asked_s is None:
            # One patience to the end of a step and one more to write what all hold, where checkpoints are kept.
            patience_s = self._told.longest_s if self._elastic.hub is None else 0.0
            self._asked_s, self._limit_s = now_s, _INTERRUPT_S + 2 * patience_s
            if patience_s:
                say(f"{signal_name(self._signals[0])}: ending with a checkpoint; Ctrl-C (again) ends at once")
            for worker in running:
                worker.process.send_signal(signal.SIGINT)  # SIGTERM would ask each of them to leave the others
        elif self._failed_s is not None and self._asked_s is None and now_s - self._failed_s >= _END_BY_THEMSELVES_S:
            self._asked_s = now_s
        if self._asked_s is None or not running:
            return
        impatient = signal.SIGINT in self._signals[1:] or (len(self._signals) > 1 and not self._told.longest_s)
        late_s = now_s - self._asked_s - self._limit_s
        for worker in running:
            hard = impatient or late_s >= _TERMINATE_S
            if hard or (late_s >= 0 and not worker.stopped_by_us):
                worker.stopped_by_us = True
                kill(worker, signal.SIGKILL if hard else signal.SIGTERM)

    def _ask_for_hub(self, now_s: float) -> None:
        """Where workers have lost the hub, start others once it answers again, or give up."""
        waiting = [place for place in self._places if place.awaits_hub and place.status is None]
        hub = self._elastic.hub if self._hub is None else self._hub.reached_here_at
        if not waiting or hub is None or self._signals or now_s < self._ask_at_s:
            return
        if self._hub is not None and self._hub.ended:
            self._give_up(waiting, f"the hub has ended with status {self._hub.ended} and cannot be started again")
            return
        trusted = None if self._hub is None else self._hub.trusted
        try:
            health = ask(hub, self._elastic.token, timeout_s=min(_ASK_S, self._elastic.patience_s / 2), trusted=trusted)
        except HubGone:
            self._give_up(waiting, f"nothing listens at {hub} any more: the run has ended")
            return
        except HubUnreachable as error:
            limit_s = _AWAY * self._elastic.patience_s
            if self._away_s is None:
                self._away_s = now_s
                say(f"waiting for {hub} to be reachable again, for {limit_s:g} s")
            elif now_s - self._away_s > limit_s:
                self._give_up(waiting, f"gave up after {limit_s:g} s: {error}")
            self._ask_at_s = time.monotonic() + _ASK_EVERY_S
            return
        except LaunchError as error:
            self._give_up(waiting, f"it is another run now: {error}")
            return
        self._away_s = None
        if health.end:
            self._give_up(waiting, f"the run at {hub} is over: {health.end}")
            return
        say(f"{hub} answers; starting {len(waiting)} worker{'s' if len(waiting) > 1 else ''} in place of those it lost")
        self._said.clear()
        for place in waiting:
            place.awaits_hub = False

    def _give_up(self, waiting: list[_Place], why: str) -> None:
        say(f"{why}. Start it again on the machine where it was started; it goes on from its last checkpoint")
        for place in waiting:
            place.status = PEER_FAILED_STATUS

    def close(self) -> None:
        """Leave no process behind."""
        for place in self._places:
            if place.worker is not None:
                kill(place.worker, signal.SIGKILL)
                place.worker.process.wait()
                place.worker.output.finish()
        self._folding.show(everything=True)
        if self._hub is not None:
            self._hub.close()
        if self._outer is not None:
            self._outer.close()
        if self._views is not None:
            self._views.close()
        self._told.close()


def _of_all(statuses: list[int]) -> int:
    """The launch's exit status: a script's failure counts most, then a run that others ended, then one that ended."""
    ordinary = (0, PEER_FAILED_STATUS, _EVICTED_STATUS)
    failed = [status for status in statuses if status > 0 and status not in (*ordinary, *_STOPPED)]
    if failed:
        return failed[0]
    if PEER_FAILED_STATUS in statuses:
        return PEER_FAILED_STATUS
    if 0 in statuses:
        return 0
    killed = [status for status in statuses if status < 0]
    return 128 - killed[0] if killed else statuses[0]
