"""Several ranks: sums on a data channel, votes on a control channel, and waits that always end.

The one idea: nobody ever blocks where it cannot be told. What may block runs on a channel's thread; the main thread
waits for the completion, for a notice from another rank, or for a deadline made from `patience_s`, whichever is first.
"""

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch.distributed import Store

from ragtag.comm.broadcast import chain_broadcast
from ragtag.comm.judge import Notice, Peers, Wait, described, error_from, grace_s, judge
from ragtag.comm.ring import SEGMENT_BYTES, Ring, Wire, chunk_sizes, mesh_exchange
from ragtag.comm.transport import Transport, TransportError
from ragtag.comm.watch_peers import PeerWatch
from ragtag.comm.work import Channel, Work
from ragtag.core.errors import DisagreementError, PeerError

_FAREWELL_S = 2.0


class RingGroup:
    """Several ranks: a data channel for rings and broadcasts, a control channel for votes, and a `PeerWatch`.

    Args:
        peers: what is known at the start: this rank, all hosts, patience, where the store is.
        clients: two clients of the group's own part of the store, used by nobody else.
        open_transport: connects the transport of a channel ("data", then "control"); runs on a channel's thread.
        local_rank: number of this rank on its host.
        segment_bytes: bytes of one message of the ring.
        on_close: called once, when the group has been closed.
    """

    def __init__(
        self,
        *,
        peers: Peers,
        clients: tuple[Store, Store],
        open_transport: Callable[[str], Transport],
        local_rank: int = 0,
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
        self._changed = threading.Condition()
        self._channels = {name: Channel(name, self._changed) for name in ("data", "control")}
        self._watch = PeerWatch(
            peers=peers, changed=self._changed, clients=clients, submitted=self._submitted, clock=clock
        )
        self._transports: dict[str, Transport] = {}
        self._closed: bool | None = None
        self._on_close = on_close
        self._opening = self._channels["data"].submit(lambda: self._open(open_transport))
        self._segment_bytes = segment_bytes

    def open(self) -> None:
        """Return when the transports are connected; everything but `announce_failure` and `close` comes after it.

        Raises:
            PeerLost, PeerFailed: another rank ended meanwhile.
        """
        self.wait(self._opening, "connecting")
        self._ring = Ring(self._transports["data"], self._segment_bytes)

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
        """Queue the sum of `flat` over ranks, in place."""
        chunks = chunk_sizes(flat.numel(), weights or [1] * self.world_size)
        number = self._channels["data"].num_submitted + 1

        def job() -> None:
            if ready is not None:
                ready()
            self._ring.all_reduce(flat, chunks, number, wire)

        return self._channels["data"].submit(job)

    def exchange(self, payload: bytes, doing: str = "exchanging votes") -> tuple[bytes, ...]:
        """Return every rank's payload, by rank."""
        number = self._channels["control"].num_submitted + 1
        return self._do("control", lambda: self._mesh(payload, "exchange", number), doing)

    def gather(self, name: str, value: Any) -> tuple[Any, ...]:
        """Return every rank's JSON-able value, by rank."""
        content = msgspec.json.encode([name, value])
        number = self._channels["control"].num_submitted + 1

        def job() -> list[bytes]:
            lengths = [int.from_bytes(each, "big") for each in self._mesh(len(content).to_bytes(8, "big"), "", number)]
            contents = self._mesh(content.ljust(max(lengths), b" "), "gather", number)
            return list(contents)

        answers = [msgspec.json.decode(each) for each in self._do("control", job, f"gathering {name!r}")]
        for rank, (other, _) in enumerate(answers):
            if other != name:
                raise DisagreementError(
                    f"Rank {self.rank} ({self.hosts[self.rank]}) gathers {name!r}, but rank {rank} "
                    f"({self.hosts[rank]}) gathers {other!r} at the same point: every rank must make the same calls."
                )
        return tuple(answer for _, answer in answers)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrite `tensors` in place with those of rank `source`."""
        number = self._channels["data"].num_submitted + 1
        self._do(
            "data",
            lambda: chain_broadcast(self._transports["data"], tensors, source, number),
            f"copying tensors from rank {source}",
        )

    def barrier(self, doing: str) -> None:
        """Return when every rank has come."""
        number = self._channels["control"].num_submitted + 1
        self._do("control", lambda: self._mesh(b"\0", "barrier", number), doing)

    def wait(self, work: Work, doing: str) -> None:
        """Return when `work` is done, or raise its error, PeerFailed or PeerLost."""
        began_s, self._watch.waiting_for = self._clock(), doing
        broken_s = None
        try:
            with self._changed:
                while work.finished_s is None or work.error is not None:
                    now_s, error = self._clock(), work.error
                    if error is not None and not isinstance(error, TransportError):
                        raise error
                    if error is not None and broken_s is None:
                        broken_s = now_s
                    notice = judge(
                        Wait(
                            channel=work.channel,
                            number=work.number,
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
                    if notice is not None:
                        break
                    self._changed.wait(min(self._peers.beat_s, grace_s(self.patience_s)) / 2)
                else:
                    return
            raise self._agree_on(notice, doing) from None
        finally:
            self._watch.waiting_for = ""

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
            with self._changed:
                self._closed = False
            self._say_goodbye()
            for transport in tuple(self._transports.values()):
                transport.close()
            ended = [channel.close(timeout_s=0.5) for channel in self._channels.values()]
            self._transports.clear()
            ended.append(self._watch.stop(timeout_s=0.5))
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
            succeeded={name: channel.num_succeeded for name, channel in self._channels.items()},
        )
        if peers.fatal is not None and not hosts_store:
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
        with self._changed:
            while not all_know() and self._clock() < end_s:
                if peers.fatal is not None:
                    end_s = min(end_s, self._clock() + _FAREWELL_S)
                self._changed.wait(0.1)
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
            with self._changed:
                self._changed.wait_for(lambda: peers.fatal is not None, limit_s if posted else 0.0)
                if peers.fatal is None:
                    # Nobody can be told. All ranks see the same by themselves; let the lowest one print it.
                    reporter = min(set(range(self.world_size)) - {notice.rank})
                    peers.fatal = msgspec.structs.replace(notice, reporter=reporter)
        assert peers.fatal is not None
        return error_from(peers.fatal, peers, doing)

    def _do(self, channel: str, job: Callable[[], Any], doing: str) -> Any:
        work = self._channels[channel].submit(job)
        self.wait(work, doing)
        return work.result

    def _mesh(self, payload: bytes, kind: str, number: int) -> tuple[bytes, ...]:
        # The tag holds what is exchanged: ranks that make different calls never match and wait, bounded, while a
        # message that is too long for its receiver would end the process.
        tag = zlib.crc32(f"{number}/{kind}/{len(payload)}".encode())
        sent = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        received = mesh_exchange(self._transports["control"], sent, tag)
        return tuple(each.numpy().tobytes() for each in received)

    def _open(self, open_transport: Callable[[str], Transport]) -> None:
        for name in self._channels:
            transport = open_transport(name)
            with self._changed:
                if self._closed is None:
                    self._transports[name] = transport
                    continue
            transport.close()
            return

    def _submitted(self) -> dict[str, int]:
        return {name: channel.num_submitted for name, channel in self._channels.items()}
