"""Heartbeats and failure notices: how each rank knows about the others while it blocks on none of them.

The one idea: notices are a numbered log in the store, appended by compare-and-set, so every rank reads the same news
in the same order and the first fatal one is the same everywhere. One thread speaks, one listens, each on its own
client, because a waiting client blocks everybody else who uses it.
"""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import Store

from ragtag.comm.bell import Bell
from ragtag.comm.judge import Notice, Peers, Sign

_FOREVER = timedelta(days=7)


class _Beat(msgspec.Struct, frozen=True, kw_only=True):
    counter: int
    step: int
    doing: str
    submitted: dict[str, int]


class PeerWatch:
    """Two daemon threads that keep `peers` up to date and tell the others about this rank.

    Args:
        peers: what is known; changed only while holding the condition of `bell`, which is rung on news.
        clients: two clients of the group's store that nobody else uses, one to speak and one to listen.
        submitted: returns how many jobs of each channel this rank has submitted.
    """

    def __init__(
        self,
        *,
        peers: Peers,
        bell: Bell,
        clients: tuple[Store, Store],
        submitted: Callable[[], dict[str, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.step = 0
        self.doing = "starting"
        self.waiting_for = ""
        """What the main thread waits for; empty: it does not wait."""
        self.ending = False
        """Whether the next `left` of this rank ends the listening thread."""
        self._peers = peers
        self._bell = bell
        self._submitted = submitted
        self._clock = clock
        self._outbox: queue.SimpleQueue[tuple[Notice, threading.Event] | None] = queue.SimpleQueue()
        peers.beaten_s = peers.looked_s = clock()
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop, client), name=f"ragtag-{name}", daemon=True)
            for name, loop, client in (("heartbeat", self._speak, clients[0]), ("notices", self._listen, clients[1]))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def listening(self) -> bool:
        """Whether the listening thread has not ended."""
        return self._threads[-1].is_alive()

    def report(self, notice: Notice, timeout_s: float) -> bool:
        """Append `notice` to the log; return whether that was done within `timeout_s` seconds."""
        if self._peers.store_failed_s is not None:
            return False
        posted = threading.Event()
        self._outbox.put((notice, posted))
        return posted.wait(timeout_s) and self._peers.store_failed_s is None

    def stop(self, timeout_s: float) -> bool:
        """End the speaking thread; the listening one ends as `ending` says. Return whether both have ended."""
        self._outbox.put(None)
        end_s = self._clock() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def _guarded(self, loop: Callable[[Store], None], client: Store) -> None:
        try:
            loop(client)
        except RuntimeError:
            with self._bell.condition:
                if self._peers.store_failed_s is None:
                    self._peers.store_failed_s = self._clock()
                self._bell.ring()
            while True:
                try:
                    pending = self._outbox.get_nowait()
                except queue.Empty:
                    return
                if pending is not None:
                    pending[1].set()

    def _speak(self, client: Store) -> None:
        peers, counter, cursor = self._peers, 0, 0
        while True:
            counter += 1
            beat = _Beat(
                counter=counter,
                step=self.step,
                doing=self.waiting_for or self.doing,
                submitted=self._submitted(),
            )
            # After a fatal notice the host of the store may be gone at any moment.
            if peers.fatal is None:
                client.set(f"heartbeat/{peers.rank}", msgspec.json.encode(beat).decode())
                if self.waiting_for:
                    self._look(client)
            with self._bell.condition:
                peers.beaten_s = self._clock()
            try:
                pending = self._outbox.get(timeout=peers.beat_s)
            except queue.Empty:
                continue
            if pending is None:
                return
            notice, posted = pending
            cursor = _append(client, notice, cursor)
            posted.set()

    def _look(self, client: Store) -> None:
        keys = {rank: f"heartbeat/{rank}" for rank in self._peers.others - set(self._peers.left)}
        present = {rank: key for rank, key in keys.items() if client.check([key])}
        values: list[Any] = client.multi_get(list(present.values())) if present else []
        now_s = self._clock()
        with self._bell.condition:
            peers = self._peers
            peers.looked_s = now_s
            for rank, value in zip(present, values, strict=True):
                beat = msgspec.json.decode(value, type=_Beat)
                known = peers.signs.get(rank)
                if known is None or known.counter != beat.counter:
                    peers.signs[rank] = Sign(
                        counter=beat.counter,
                        seen_s=now_s,
                        step=beat.step,
                        doing=beat.doing,
                        submitted=beat.submitted,
                    )
            for rank in keys.keys() - present.keys() - peers.signs.keys():
                peers.signs[rank] = Sign(counter=-1, seen_s=now_s, doing="not started")
            self._bell.ring()

    def _listen(self, client: Store) -> None:
        peers, cursor = self._peers, 0
        while True:
            client.wait([_key(cursor)], _FOREVER)
            notice = msgspec.json.decode(client.get(_key(cursor)), type=Notice)
            cursor += 1
            first_fatal = notice.fatal and peers.fatal is None
            if first_fatal and notice.reporter != peers.rank:
                seen = Notice(kind="seen", rank=peers.rank, reporter=peers.rank)
                _append(client, seen, cursor)
            with self._bell.condition:
                if first_fatal:
                    peers.fatal = notice
                elif notice.kind == "left":
                    peers.left[notice.rank] = notice
                elif notice.kind == "seen":
                    peers.seen.add(notice.rank)
                self._bell.ring()
            if self.ending and notice.kind == "left" and notice.rank == peers.rank:
                return
            # The host of the store stays to hear who has seen the notice; the others must not need it any more.
            if first_fatal and peers.rank != peers.store_rank:
                return


def _append(client: Store, notice: Notice, cursor: int) -> int:
    """Put `notice` at the end of the log and return the position after it."""
    content = msgspec.json.encode(notice).decode()
    while True:
        found = client.compare_set(_key(cursor), "", content)
        cursor += 1
        if found.decode() == content:
            return cursor


def _key(cursor: int) -> str:
    return f"news/{cursor}"
