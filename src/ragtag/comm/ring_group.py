"""Several ranks: sums on a data channel, votes over a mesh of sockets, and waits that always end.

The one idea: nobody ever blocks where it cannot be told. What may block runs on the data channel's thread; the main
thread waits for its completion, or in the mesh's selector for what the others send, and in both places for a notice
from another rank or a deadline made from `patience_s`, whichever is first.
"""

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch.distributed import PrefixStore, Store

from ragtag.comm.bell import Bell
from ragtag.comm.broadcast import chain_broadcast
from ragtag.comm.device_sum import DeviceSum, MakeDeviceSum, Recorded
from ragtag.comm.frame import PAYLOAD_LIMIT_BYTES
from ragtag.comm.judge import Notice, Peers, Wait, described, different_calls, error_from, grace_s, judge
from ragtag.comm.link_times import LinkTimes, boot_id
from ragtag.comm.ring import SEGMENT_BYTES, Ring, RingTime, Wire
from ragtag.comm.socket_mesh import Delay, SocketMesh
from ragtag.comm.transport import Transport, TransportError
from ragtag.comm.watch_peers import PeerWatch
from ragtag.comm.work import Channel, Work
from ragtag.core.chunks import chunk_sizes
from ragtag.core.errors import DisagreementError, PeerError, RagtagError

_FAREWELL_S = 2.0
_NEEDS_NOBODY = 1 << 62
"""More jobs than there will be: nobody who waits for this channel waits for a rank that has left."""


class RingGroup:
    """Several ranks: a data channel for rings and broadcasts, a `SocketMesh` for votes, and a `PeerWatch`.

    Args:
        peers: what is known at the start: this rank, all hosts, patience, where the store is.
        clients: two clients of the group's own part of the store, used by nobody else.
        claims: a third one, for the counters that work is claimed with.
        connect_sockets: connects the mesh, one socket for each other rank; runs on the data channel's thread.
        open_transport: connects the data channel's transport; runs there too, afterwards.
        local_rank: number of this rank on its host.
        delay_s: see `SocketMesh`.
        segment_bytes: bytes of one message of the ring.
        on_close: called once, when the group has been closed.
    """

    elastic = False

    def __init__(
        self,
        *,
        peers: Peers,
        clients: tuple[Store, Store],
        claims: Store,
        connect_sockets: Callable[[], Mapping[int, socket.socket]],
        open_transport: Callable[[], Transport],
        local_rank: int = 0,
        delay_s: Delay | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        on_close: Callable[["RingGroup"], object] = lambda group: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = peers.rank
        self.hosts = tuple(peers.hosts)
        self.world_size = len(self.hosts)
        self.local_rank = local_rank
        self.patience_s = peers.patience_s
        self._peers = peers
        self._clock = clock
        self._bell = Bell()
        self._data = Channel("data", self._bell.condition)
        self._claims_store = claims
        self._claims: Channel | None = None
        self._posted = ""
        self.device_sum: MakeDeviceSum | None = None
        """What sums tensors where they are; None: the ring does, through host memory."""
        self._device: DeviceSum | None = None
        self._mesh: SocketMesh | None = None
        self._transport: Transport | None = None
        self._watch = PeerWatch(peers=peers, bell=self._bell, clients=clients, submitted=self._submitted, clock=clock)
        self._closed: bool | None = None
        self._on_close = on_close
        self._delay_s = delay_s
        self._segment_bytes = segment_bytes
        self._counted_bytes = self._taken_bytes = 0
        self._link_times = LinkTimes(self.rank, self.world_size, clock_name=boot_id())
        self._opening = self._data.submit(lambda: self._open(connect_sockets, open_transport))

    def open(self) -> None:
        """Return when all is connected; everything but `announce_failure` and `close` comes after it.

        Raises:
            PeerLost, PeerFailed: another rank ended meanwhile.
        """
        self.wait(self._opening, "connecting")
        assert self._transport is not None
        self._ring = Ring(self._transport, self._segment_bytes, self._link_times)

    @property
    def step(self) -> int:
        """The step that others are told."""
        return self._watch.step

    @property
    def doing(self) -> str:
        """What others are told this rank is doing."""
        return self._watch.doing

    @property
    def failure(self) -> PeerError | None:
        """What ended the group, if anything did."""
        fatal = self._peers.fatal
        return None if fatal is None else error_from(fatal, self._peers, self.doing)

    def note(self, step: int, doing: str) -> None:
        """Set what others are told about this rank; two attribute writes."""
        self._watch.step, self._watch.doing = step, doing

    def all_reduce(
        self,
        flat: torch.Tensor,
        *,
        weights: Sequence[int] | None = None,
        wire: Wire | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Work:
        """Queue the sum of `flat` over ranks, in place; the work's result is a `RingTime`."""
        if self.device_sum is not None:
            return self._sum_on_devices(flat, self.device_sum)
        chunks = chunk_sizes(flat.numel(), weights or [1] * self.world_size)
        number = self._data.num_submitted + 1

        def job() -> RingTime:
            if ready is not None:
                ready()
            return self._ring.all_reduce(flat, chunks, number, wire)

        return self._data.submit(job)

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        sizes: Sequence[int],
        *,
        wire: Wire | None = None,
        ready: Callable[[], None] | None = None,
        done: Callable[[], None] | None = None,
    ) -> Work:
        """Queue the sum of `flat` over ranks, of which each rank gets its own chunk, in place."""
        handed_over, number = Recorded(flat), self._data.num_submitted + 1

        def job() -> RingTime:
            handed_over.wait()
            if ready is not None:
                ready()
            spent = self._ring.reduce_scatter(flat, sizes, number, wire)
            if done is not None:
                done()
            return spent

        return self._data.submit(job)

    def all_gather(self, flat: torch.Tensor, sizes: Sequence[int]) -> Work:
        """Queue the filling of every chunk of `flat` with what its owner has there."""
        handed_over, number = Recorded(flat), self._data.num_submitted + 1

        def job() -> RingTime:
            handed_over.wait()
            return self._ring.all_gather(flat, sizes, number)

        return self._data.submit(job)

    def _sum_on_devices(self, flat: torch.Tensor, make: MakeDeviceSum) -> Work:
        handed_over = Recorded(flat)

        def job() -> RingTime:
            handed_over.wait()
            if self._device is None:
                store = PrefixStore("devices", self._claims_store)
                self._device = make(store, self.rank, self.world_size, self.patience_s)
            self._device.all_reduce(flat)
            return RingTime()

        return self._data.submit(job)

    def exchange(self, payload: bytes, doing: str = "exchanging votes") -> tuple[bytes, ...]:
        """Return every rank's payload, by rank."""
        return self._meet(f"exchange/{len(payload)}", doing, f"{doing} of {len(payload)} bytes", payload)

    def gather(self, name: str, value: Any) -> tuple[Any, ...]:
        """Return every rank's JSON-able value, by rank."""
        content, doing = msgspec.json.encode(value), f"gathering {name!r}"
        if len(content) > PAYLOAD_LIMIT_BYTES:
            raise RagtagError(
                f"Rank {self.rank} ({self.hosts[self.rank]}): {doing} takes {len(content)} bytes as JSON, over the "
                f"limit of {PAYLOAD_LIMIT_BYTES}. Keep large values in tensors."
            )
        return tuple(msgspec.json.decode(each) for each in self._meet(f"gather/{name!r}", doing, doing, content))

    def claim(self, serial: int, decide: Callable[[int], int]) -> Work:
        """Queue a claim from pool number `serial`; its result is (how many were claimed before, how many it claims)."""
        key = f"claimed/{serial}"

        def job() -> tuple[int, int]:
            # Decided on what the others have claimed by now: what was known at the last claim is long out of date.
            claimed = self._claims_store.add(key, 0)
            count = decide(claimed)
            if count > 0:
                claimed = self._claims_store.add(key, count) - count
            if self.rank == 0:
                self._claims_store.delete_key(f"claimed/{serial - 2}")  # everybody has voted on that step
            return claimed, count

        return self._on_claims(job)

    def post(self, name: str) -> Work:
        """Queue a note for all ranks, called `name`, without waiting for any of them; it replaces the one before."""
        before, self._posted = self._posted, name

        def job() -> None:
            self._claims_store.set(f"posted/{name}", "1")
            if before not in ("", name):
                self._claims_store.delete_key(f"posted/{before}")

        return self._on_claims(job)

    def posted(self, name: str) -> Work:
        """Queue a look whether any rank has posted `name`; the work's result says so."""
        return self._on_claims(lambda: self._claims_store.check([f"posted/{name}"]))

    def _on_claims(self, job: Callable[[], Any]) -> Work:
        if self._claims is None:
            self._claims = Channel("claims", self._bell.condition)

        def asking() -> Any:
            try:
                return job()
            except RuntimeError as error:  # what the store's client raises once its host is gone
                text = f"its store, {self._peers.store_name}, does not answer ({described(error)})"
                raise TransportError(text, peer=self._peers.store_rank) from error

        return self._claims.submit(asking)

    def take_link_s(self) -> float:
        """Return how many seconds this rank has waited for what was under way on the link from the preceding rank."""
        return self._link_times.take()

    def count_sent(self, num_bytes: int) -> None:
        """From a job: so many bytes were handed to a link."""
        self._counted_bytes += num_bytes

    def take_sent_bytes(self) -> int:
        """Return how many bytes of sums and of jobs that count them were handed to links since the last call."""
        before, self._taken_bytes = self._taken_bytes, self._ring.sent_bytes + self._counted_bytes
        return self._taken_bytes - before

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrite `tensors` in place with those of rank `source`."""
        transport, number = self._transport, self._data.num_submitted + 1
        assert transport is not None
        work = self._data.submit(lambda: chain_broadcast(transport, tensors, source, number))
        self.wait(work, f"copying tensors from rank {source}")

    def on_transport(self, job: Callable[[Transport], Any]) -> Work:
        """Queue a `job` that sends and receives between single ranks; the work's result is what it returns."""
        transport = self._transport
        assert transport is not None
        return self._data.submit(lambda: job(transport))

    def nudge(self) -> None:
        """From a job: let those who wait `until` something look again."""
        with self._bell.condition:
            self._bell.condition.notify_all()

    def barrier(self, doing: str) -> None:
        """Return when every rank has come."""
        self._meet("barrier", doing, doing, b"")

    def confirm(self) -> None:
        """Raise what ended the group, if anything did."""
        if self.failure is not None:
            raise self.failure

    def wait(self, work: Work, doing: str, until: Callable[[], bool] | None = None) -> None:
        """Return when `work` is done, or `until` is true; or raise its error, PeerFailed or PeerLost."""
        with self._waiting(work.channel, work.number, doing) as hopeless, self._bell.condition:
            work.awaited = True
            while work.finished_s is None or work.error is not None:
                if until is not None and until():
                    break
                if work.error is not None and not isinstance(work.error, TransportError):
                    raise work.error
                if hopeless(work.error):
                    break
                self._bell.condition.wait(self._nap_s)

    def _meet(self, call: str, doing: str, told: str, payload: bytes) -> tuple[bytes, ...]:
        """Send `payload` to every rank and return all of theirs; whose `call` differs is told so, as doing `told`."""
        mesh, peers, differing_s = self._mesh, self._peers, None
        assert mesh is not None
        number = mesh.begin(call, told, payload)
        # In the good case nothing is judged: that costs as much as sending.
        going_well = peers.fatal is None and not peers.left
        with self._waiting("control", number, doing) as hopeless:
            while not mesh.complete:
                if mesh.differs:
                    # The others' parts are on their way: with all of them every rank says the same, and one prints it.
                    differing_s = differing_s or self._clock()
                    if self._clock() - differing_s >= grace_s(self.patience_s):
                        break
                if not going_well and hopeless(mesh.error):
                    break
                going_well = mesh.advance(self._nap_s)
        if mesh.differs:
            raise DisagreementError(different_calls(mesh.answers, peers))
        return mesh.finish()

    @contextmanager
    def _waiting(self, channel: str, number: int, doing: str) -> Iterator[Callable[[TransportError | None], bool]]:
        """Give a function that says whether this wait, broken by an error or not, must end; if so, raise why."""
        began_s, broken_s, notice = self._clock(), None, None

        def hopeless(error: TransportError | None) -> bool:
            nonlocal broken_s, notice
            now_s = self._clock()
            if error is not None and broken_s is None:
                broken_s = now_s
            with self._bell.condition:
                notice = judge(
                    Wait(
                        channel=channel,
                        number=number,
                        doing=doing,
                        step=self.step,
                        began_s=began_s,
                        broken_s=broken_s,
                        broken_peer=error.peer if error is not None else None,
                        broken_text=str(error) if error is not None else "",
                    ),
                    self._peers,
                    now_s,
                )
            return notice is not None

        self._watch.waiting_for = doing
        try:
            yield hopeless
            if notice is not None:
                raise self._agree_on(notice, doing) from None
        finally:
            self._watch.waiting_for = ""

    def abandon(self, reason: str) -> None:
        """Make every wait of this rank raise PeerLost with `reason`; from any thread, and nobody else is told."""
        with self._bell.condition:
            if self._peers.fatal is None:
                self._peers.fatal = Notice(
                    kind="lost", rank=-1, reporter=self.rank, text=reason, step=self.step, doing=self.doing
                )
            self._bell.ring()
        if self._device is not None:
            self._device.abort()

    def announce_failure(self, error: BaseException, doing: str) -> None:
        """Tell all ranks that this one fails; the first failure wins."""
        if self._closed is not None or self._peers.fatal is not None or isinstance(error, PeerError):
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        notice = Notice(
            kind="interrupted" if interrupted else "failed",
            rank=self.rank,
            reporter=self.rank,
            text="Ctrl-C" if interrupted else described(error),
            step=self.step,
            doing=doing,
        )
        self._agree_on(notice, doing)

    def close(self) -> bool:
        """Say goodbye and let go of threads and sockets; return whether every thread ended."""
        if self._closed is None:
            with self._bell.condition:
                self._closed = False
            self._say_goodbye()
            if self._device is not None:
                self._device.abort()
            if self._mesh is not None:
                self._mesh.close()
            if self._transport is not None:
                self._transport.close()
            ended = [self._data.close(timeout_s=0.5)]
            if self._claims is not None:
                ended.append(self._claims.close(timeout_s=0.5))
            self._transport = None
            ended.append(self._watch.stop(timeout_s=0.5))
            self._bell.close()
            self._closed = all(ended)
            self._on_close(self)
        return self._closed

    def _say_goodbye(self) -> None:
        """Post `left`; the store's host stays until all others have said goodbye or know of the failure."""
        peers, watch = self._peers, self._watch
        hosts_store = self.rank == peers.store_rank
        left = Notice(
            kind="left",
            rank=self.rank,
            reporter=self.rank,
            step=self.step,
            doing=self.doing,
            succeeded={
                "data": self._data.num_succeeded,
                "control": self._mesh.num_finished if self._mesh is not None else 0,
                "claims": _NEEDS_NOBODY,
            },
        )
        if peers.fatal is not None and not hosts_store:
            if watch.listening:  # this rank alone knows that the group is over, and only news ends that thread
                watch.ending = True
                watch.report(left, min(_FAREWELL_S, self.patience_s / 2))
            return
        watch.ending = not hosts_store
        posted = watch.report(left, min(_FAREWELL_S, self.patience_s))
        if not hosts_store or not posted:
            return

        def all_know() -> bool:
            knowing = peers.seen | set(peers.left)
            if peers.fatal is not None:
                knowing |= {peers.fatal.reporter, peers.fatal.rank}
            return peers.others <= knowing

        end_s = self._clock() + self.patience_s
        with self._bell.condition:
            while not all_know() and self._clock() < end_s:
                if peers.fatal is not None:
                    end_s = min(end_s, self._clock() + _FAREWELL_S)
                self._bell.condition.wait(0.1)
        watch.ending = True
        watch.report(left, min(_FAREWELL_S, self.patience_s))

    def _agree_on(self, notice: Notice, doing: str) -> PeerError:
        """Report `notice` unless there was one before, and return the error all ranks raise for the first one."""
        peers = self._peers
        if peers.fatal is None:
            # A frozen host of the store answers nobody, and the end must come within patience_s.
            frozen = notice.kind == "lost" and notice.rank in (-1, peers.store_rank)
            limit_s = min(_FAREWELL_S, self.patience_s / (10 if frozen else 2))
            posted = self._watch.report(notice, limit_s)
            with self._bell.condition:
                self._bell.condition.wait_for(lambda: peers.fatal is not None, limit_s if posted else 0.0)
                if peers.fatal is None:
                    # Nobody can be told. All ranks see the same by themselves; let the lowest one print it.
                    reporter = min(set(range(self.world_size)) - {notice.rank})
                    peers.fatal = msgspec.structs.replace(notice, reporter=reporter)
        assert peers.fatal is not None
        return error_from(peers.fatal, peers, doing)

    def _open(
        self, connect_sockets: Callable[[], Mapping[int, socket.socket]], open_transport: Callable[[], Transport]
    ) -> None:
        sockets = connect_sockets()
        with self._bell.condition:
            closed = self._closed is not None
            if not closed:
                self._mesh = SocketMesh(
                    self.rank,
                    sockets,
                    self._bell,
                    delay_s=self._delay_s,
                    clock=self._clock,
                    riders=self._link_times,
                )
        if closed:
            for each in sockets.values():
                each.close()
            return
        transport = open_transport()
        with self._bell.condition:
            closed = self._closed is not None
            if not closed:
                self._transport = transport
        if closed:
            transport.close()

    @property
    def _nap_s(self) -> float:
        """How long to wait before the time is looked at again, in seconds."""
        return min(self._peers.beat_s, grace_s(self.patience_s)) / 2

    def _submitted(self) -> dict[str, int]:
        mesh = self._mesh
        return {"data": self._data.num_submitted, "control": mesh.num_begun if mesh is not None else 0}
