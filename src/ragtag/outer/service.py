"""The outer loop's one place: who is there, what has come, when it is merged, and who is told.

The one idea: islands are never waited for by name. What has come is counted, what is worthless is refused and named,
and a version exists for islands only once it is on disk. No sockets here: messages in, messages out, a clock given.
"""

import logging
import time
from collections.abc import Callable, Iterator
from zlib import crc32

import msgspec

from ragtag.outer.admission import NAME_LIMIT, why_denied
from ragtag.outer.codec import WorthlessDelta, decode
from ragtag.outer.merging import Merging, why_wrong_size
from ragtag.outer.protocol import (
    PIECE_BYTES,
    Attach,
    Attached,
    Beat,
    Content,
    Denied,
    Detach,
    Fetch,
    Gone,
    Merged,
    Offer,
    Opened,
    Piece,
    Reading,
    Ready,
    Refused,
    Retuned,
    Stage,
    Taken,
    Tempo,
    Wanted,
    from_island,
    pack,
)
from ragtag.outer.session import Arriving, Session
from ragtag.outer.store import Kept, Model, Store, Tuned
from ragtag.outer.store import Opened as OpenedRecord
from ragtag.outer.tempo import Tuner
from ragtag.outer.transfer import TransferError
from ragtag.watch.events import Event, IslandChanged

log = logging.getLogger("ragtag.outer")

_STATE_LIMIT_BYTES = 1 << 36


class Service:
    """The outer loop of one run.

    Args:
        store: what was there before.
        run: its name; islands of other runs are denied.
        version: ragtag's; islands of others are denied.
        patience_s: bounds every wait, in seconds.
        tell: told events for the log.
        clock: seconds that only ever grow.
    """

    def __init__(
        self,
        store: Store,
        *,
        run: str,
        version: str,
        patience_s: float,
        tell: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._run, self._version = store, run, version
        self._patience_s, self._tell, self._clock = patience_s, tell, clock
        self._model = store.model
        self.merging = Merging(store, patience_s=patience_s, tell=tell, clock=clock)
        self._sessions: dict[str, Session] = {}
        """By island, those that are attached."""
        self._arriving = Arriving()
        self._alone: str | None = None
        """The island that warms up."""
        self._alone_lost_s: float | None = None
        self._tuner = Tuner(self._wanted, store.tempo)
        self._awaited = self.merging.islands
        """Islands that were there before this process was started again, and may just be coming back."""
        self._began_s = clock()
        self._over = False
        """All islands have done their last step; until another one comes."""

    # Connections

    def receive(self, session: Session, message: bytes | memoryview) -> None:
        """Take in what came on a connection; where that is garbage, the connection is to be closed."""
        session.heard_s = self._clock()
        try:
            frame, payload = from_island(message)
        except msgspec.DecodeError as error:
            self._drop(session, f"it sent what is no message of ragtag's ({error})")
            return
        if session.attach is None:
            if isinstance(frame, Attach):
                self._attach(session, frame)
            else:
                self._drop(session, "its first message is no Attach")
        elif isinstance(frame, Attach):
            self._drop(session, "it attached twice on one connection")
        elif self._sessions.get(session.island) is not session:
            session.close("a newer connection has replaced it")
        else:
            self._take(session, frame, payload)

    def lost(self, session: Session, reason: str) -> None:
        """A connection has ended; the others do not wait for that island any more."""
        if self._sessions.get(session.island) is not session or not session.island:
            return
        del self._sessions[session.island]
        offer = session.offer
        incoming = None if offer is None else self._arriving.under_way(session.island, offer.key)
        if offer is not None and incoming is not None and not incoming.complete:
            part = incoming.received / incoming.num_bytes if incoming.num_bytes else 1.0
            reason = f"{reason}, in the middle of a transfer ({offer.kind} of fragment {offer.fragment}, {part:.0%})"
        if self._over:
            self._changed(session.island, "left", f"its script has ended{_waited(session.beat)}")
        else:
            self._changed(session.island, "lost", reason)
        if session.island == self._alone:
            self._alone_lost_s = self._clock()
        self.tick()

    def tick(self) -> None:
        """Time has passed."""
        now_s = self._clock()
        for session in list(self._sessions.values()):
            if now_s - session.heard_s > 2 * self._patience_s:
                session.close(f"nothing came for {now_s - session.heard_s:.3g} s")
                self.lost(session, f"nothing came for {now_s - session.heard_s:.3g} s")
        if self._alone_lost_s is not None and now_s - self._alone_lost_s > self._patience_s:
            self._pass_on_warm_up()
        for number in list(self.merging.fragments):
            self._merge_if_due(number)
        self._end_if_all_have()

    def _end_if_all_have(self) -> None:
        """Once all islands have done their last step, and everything is merged, say so."""
        if self._over or self._store.opened is None or self._training():
            return
        if not any(session.beat.finished for session in self._sessions.values()):
            return
        if self.merging.under_way:
            return
        self._over = True
        log.info("all islands have done their last step")
        for session in self._sessions.values():
            session.say(Stage(stage="over"))

    @property
    def islands(self) -> tuple[str, ...]:
        """Those that are attached."""
        return tuple(self._sessions)

    def _drop(self, session: Session, reason: str) -> None:
        self._changed(session.island or session.caller, "refused", reason)
        session.close(reason)

    def _changed(self, island: str, change: str, text: str) -> None:
        log.log(logging.INFO if change in ("attached", "left") else logging.WARNING, "island %s: %s", island, text)
        self._tell(IslandChanged(island=island, change=change, text=text))  # pyright: ignore[reportArgumentType]

    # Coming and going

    def _attach(self, session: Session, frame: Attach) -> None:
        reason = why_denied(frame, self._model, run=self._run, version=self._version)
        if reason:
            self._changed(frame.island[:NAME_LIMIT] or session.caller, "denied", reason)
            session.say(Denied(reason=reason))
            session.close(reason)
            return
        older = self._sessions.get(frame.island)
        if older is not None:
            older.close("a newer connection has replaced it")
            del self._sessions[frame.island]
        session.attach = frame
        session.beat = Beat(step=frame.step, samples_per_s=frame.samples_per_s, training=frame.training)
        if self._model is None:
            self._model = Model(
                model=frame.model, numel=frame.numel, data=frame.data, batch=frame.batch, wanted=frame.wanted
            )
            self._store.note(self._model)
            self._tuner = Tuner(frame.wanted, None)
        self._sessions[frame.island] = session
        if self._store.opened is None and self._alone in (None, frame.island):
            self._alone, self._alone_lost_s = frame.island, None
        self._over = False
        self._awaited.discard(frame.island)
        stage = "open" if self._store.opened is not None else "alone" if self._alone == frame.island else "wait"
        numbers = range(len(self._model.numel))
        session.say(
            Attached(
                epoch=self._store.epoch,
                stage=stage,
                versions=tuple(map(self.merging.version, numbers)),
                sequences=tuple(self.merging.whole(number, frame.island) for number in numbers),
                step=int(self.merging.step),
                islands=len(self._sessions),
                tempo=self._tuner.tempo,
            )
        )
        words = {"open": "trains with the others", "alone": "warms up alone", "wait": "waits for the warm-up"}
        others = "" if frame.wanted == self._model.wanted else "; mode and H are as the first island's script says"
        self._changed(frame.island, "attached", f"from {session.caller}, at step {frame.step}: {words[stage]}{others}")

    def _pass_on_warm_up(self) -> None:
        waiting = next(iter(self._sessions), None)
        lost, self._alone, self._alone_lost_s = self._alone, waiting, None
        if waiting is not None:
            self._changed(waiting, "attached", f"warms up in place of {lost}, which has not come back")
            self._sessions[waiting].say(Stage(stage="alone"))

    # What comes from an island

    def _take(self, session: Session, frame: object, payload: memoryview) -> None:
        if isinstance(frame, Offer):
            self._offered(session, frame)
        elif isinstance(frame, Piece):
            self._piece(session, frame, payload)
        elif isinstance(frame, Fetch):
            self._fetch(session, frame)
        elif isinstance(frame, Beat):
            session.beat = frame
            self._tune()
            self.tick()
        elif isinstance(frame, Reading):
            self._tuner.read(session.island, frame, self._tell)
            self._announce_tempo()
        elif isinstance(frame, Detach):
            del self._sessions[session.island]
            self._arriving.left(session.island)
            self._changed(session.island, "left", f"{frame.reason or 'its script has ended'}{_waited(session.beat)}")
            session.close("you left")
            if session.island == self._alone:
                self._pass_on_warm_up()
            self.tick()

    def _offered(self, session: Session, offer: Offer) -> None:
        reason = self._worthless(session.island, offer)
        if reason:
            self._refuse(session, offer, reason)
            return
        incoming = self._arriving.offered(session.island, offer)
        session.offer = offer
        session.say(Ready(key=offer.key, offset=incoming.received))
        if incoming.complete:
            self._complete(session, offer)

    def _worthless(self, island: str, offer: Offer) -> str:
        """Why what is offered is not even looked at; empty: it may come."""
        assert self._model is not None
        opened = self._store.opened is not None
        if offer.kind in ("state", "theta"):
            if opened or island != self._alone:
                return "the values that all begin with are here already" if opened else "another island warms up"
            if offer.kind == "state":
                return "" if 0 <= offer.num_bytes <= _STATE_LIMIT_BYTES else f"{offer.num_bytes} bytes are too many"
        elif offer.kind != "delta":
            return f"nobody is waiting for '{offer.kind}'"
        if not 0 <= offer.fragment < len(self._model.numel):
            return f"there is no fragment {offer.fragment}"
        if offer.kind == "theta":
            return why_wrong_size(offer, self._model)
        if not opened:
            return "there is nothing yet to take a difference from"
        return self.merging.why_worthless(island, offer, self._model)

    def _refuse(self, session: Session, offer: Offer, reason: str) -> None:
        self._arriving.done(session.island, offer.key)
        self._changed(session.island, "refused", f"{offer.kind} of fragment {offer.fragment} was not taken: {reason}")
        session.say(Refused(key=offer.key, reason=reason))

    def _piece(self, session: Session, piece: Piece, payload: memoryview) -> None:
        offer, incoming = session.offer, self._arriving.under_way(session.island, piece.key)
        if offer is None or offer.key != piece.key or incoming is None:
            return  # of a transfer that was refused meanwhile
        try:
            incoming.take(piece, payload)
        except TransferError as error:
            self._drop(session, str(error))
            self.lost(session, str(error))
            return
        if incoming.complete:
            self._complete(session, offer)

    def _complete(self, session: Session, offer: Offer) -> None:
        incoming = self._arriving.under_way(session.island, offer.key)
        assert incoming is not None
        session.offer = None
        try:
            data = incoming.whole()
        except TransferError as error:
            self._refuse(session, offer, str(error))
            return
        self._arriving.done(session.island, offer.key)
        if offer.kind == "delta":
            self._contribute(session, offer, data)
        else:
            self._begin_with(session, offer, data)

    # The values that all begin with

    def _begin_with(self, session: Session, offer: Offer, data: memoryview) -> None:
        assert self._model is not None
        if offer.kind == "theta":
            try:
                values = decode("fp32", data, self._model.numel[offer.fragment])
                self.merging.begin_with(offer.fragment, values, offer.step)
            except WorthlessDelta as error:
                self._refuse(session, offer, str(error))
                return
        else:
            self._store.keep_state(data)
        session.say(Taken(key=offer.key))
        if offer.kind != "state":
            return
        if len(self.merging.fragments) < len(self._model.numel):
            self._drop(session, "it gave its state before its values")
            return
        # The state comes last: with it, everything is there.
        opened = OpenedRecord(step=offer.step, num_bytes=len(data), digest=offer.digest)
        self._store.note(opened)
        self._store.opened = opened
        self.merging.step, self._alone = float(offer.step), None
        for each in self._sessions.values():
            each.say(Stage(stage="open", step=offer.step))
        log.info("all islands train from step %d on", offer.step + 1)

    # Merging

    def _contribute(self, session: Session, offer: Offer, data: memoryview) -> None:
        assert self._model is not None
        try:
            assert session.attach is not None
            is_first = self.merging.contribute(
                session.island, offer, data, self._model, self._training(), dataset=session.attach.dataset
            )
        except WorthlessDelta as error:
            self._refuse(session, offer, str(error))
            return
        session.say(Taken(key=offer.key))
        if is_first:
            for each in self._sessions.values():
                if each is not session:
                    each.say(Opened(fragment=offer.fragment, version=self.merging.version(offer.fragment)))
        self._merge_if_due(offer.fragment)

    def _training(self) -> list[str]:
        if self._awaited and self._clock() - self._began_s > self._patience_s / 2:
            self._awaited.clear()
        training = [name for name, each in self._sessions.items() if each.beat.training and not each.beat.finished]
        return [*training, *self._awaited]

    def _merge_if_due(self, number: int) -> None:
        assert self._model is not None
        tuner, training = self._tuner, self._training()
        inner_s = max((each.beat.inner_s for each in self._sessions.values()), default=0.0)
        reason = self.merging.due(number, training, tuner.tempo, inner_s)
        if not reason:
            return
        self.merging.merge(
            number,
            reason,
            tuner.tempo,
            momentum=tuner.momentum,
            part=1 / max(1, len(training)) if tuner.tempo.asynchronous else 1.0,
            batch=self._model.batch,
        )
        fragment = self.merging.fragments[number]
        for name, session in self._sessions.items():
            merged = fragment.merged.get(name, 0)
            version = fragment.values.version
            session.say(Merged(fragment=number, version=version, merged=merged, step=self.merging.step))

    # What islands fetch

    def _fetch(self, session: Session, fetch: Fetch) -> None:
        found = None
        if self._store.opened is not None and fetch.kind == "state":
            found = 0, "raw", self._store.state
        elif self._store.opened is not None:
            found = self.merging.found(fetch)
        if found is None:
            session.say(Gone(kind=fetch.kind, fragment=fetch.fragment, version=fetch.version))
            return
        version, codec, kept = found
        fragment = self.merging.fragments.get(fetch.fragment)
        content = Content(
            key=f"{fetch.kind}/{fetch.fragment}/{version}",
            kind=fetch.kind,
            fragment=fetch.fragment,
            version=version,
            codec=codec,
            num_bytes=kept.num_bytes,
            digest=kept.digest,
            newest=self.merging.version(fetch.fragment),
            merged=0 if fragment is None else fragment.merged.get(session.island, 0),
        )
        if not session.stream(_messages(content, kept, fetch.offset)):
            self._drop(session, "it fetches more than it takes")

    # Tempo

    @property
    def _wanted(self) -> Wanted | None:
        return None if self._model is None else self._model.wanted

    def _tune(self) -> None:
        self._tuner.measured({name: session.beat for name, session in self._sessions.items()}, self._tell)
        self._announce_tempo()

    def _announce_tempo(self) -> None:
        tempo: Tempo | None = self._tuner.take_news()
        if tempo is None:
            return
        self._store.note(Tuned(tempo=tempo))
        for session in self._sessions.values():
            session.say(Retuned(tempo=tempo))


def _waited(beat: Beat) -> str:
    total_s = beat.waited_s + beat.compute_s
    return f"; it has waited {beat.waited_s / total_s:.1%} of its time" if total_s else ""


def _messages(content: Content, kept: Kept, offset: int) -> Iterator[bytes]:
    pieces = kept.pieces(PIECE_BYTES, offset)
    next(pieces)  # opens the file, which the next merge removes

    def all_of_it() -> Iterator[bytes]:
        yield pack(content)
        for start, payload in pieces:
            yield pack(Piece(key=content.key, offset=start, crc32=crc32(payload)), payload)

    return all_of_it()
