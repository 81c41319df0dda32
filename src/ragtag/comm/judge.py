"""Why a wait must end: a pure function from what a rank knows about its peers to a notice, or to nothing yet.

The one idea: waiting threads decide nothing. They hand over what they wait for and what is known, and get back the
one notice that all ranks will raise the same error from; every rule about patience is in this file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from ragtag.comm.frame import Frame
from ragtag.core.errors import PeerError, PeerFailed, PeerLost


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """News about one rank, in the same order on every rank; the first that is `fatal` ends the group.

    kinds: `failed` and `interrupted` (it raised), `lost` (others gave it up), `left` (its script ended), `seen` (it
    knows of the fatal notice).
    """

    kind: Literal["failed", "interrupted", "lost", "left", "seen"]
    rank: int
    """Whom it is about; -1: nobody in particular."""
    reporter: int
    """Who said so, and who prints it."""
    text: str = ""
    step: int = 0
    doing: str = ""
    succeeded: dict[str, int] = {}
    """`left` only: how many jobs of each channel the rank has finished."""

    @property
    def fatal(self) -> bool:
        """Whether it ends the group."""
        return self.kind in ("failed", "interrupted", "lost")


@dataclass(frozen=True, kw_only=True)
class Sign:
    """The last sign of life of a rank: what its heartbeat said, and when that last changed by our own clock."""

    counter: int
    seen_s: float
    step: int = 0
    doing: str = ""
    submitted: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Peers:
    """All that one rank knows about the others; times are seconds of its own monotonic clock."""

    rank: int
    hosts: Sequence[str]
    patience_s: float
    store_rank: int | None
    """Which rank hosts the store; None: a launcher does."""
    store_name: str
    beat_s: float = 0.0
    looked_s: float = 0.0
    """When the others' heartbeats were last read."""
    beaten_s: float = 0.0
    """When our own heartbeat last got through."""
    store_failed_s: float | None = None
    fatal: Notice | None = None
    left: dict[int, Notice] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    signs: dict[int, Sign] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.beat_s = beat_s(self.patience_s)

    def name(self, rank: int) -> str:
        """Return `rank 1 (hostname)`."""
        return f"rank {rank} ({self.hosts[rank]})"

    @property
    def others(self) -> set[int]:
        """All ranks but this one."""
        return set(range(len(self.hosts))) - {self.rank}


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What a rank waits for: job `number` of `channel`, since `began_s`; and how it failed, if it did."""

    channel: str
    number: int
    doing: str
    step: int
    began_s: float
    broken_s: float | None = None
    broken_peer: int | None = None
    broken_text: str = ""


def beat_s(patience_s: float) -> float:
    """Return the seconds between two heartbeats."""
    return min(max(patience_s / 10, 0.05), 2.0)


def grace_s(patience_s: float) -> float:
    """Return how long a broken connection waits for the notice that explains it, in seconds."""
    return min(1.0, patience_s / 2)


def silence_s(patience_s: float) -> float:
    """Return how long a rank may be silent: two heartbeats less than the patience, so that its end is within it."""
    return patience_s - 2 * beat_s(patience_s)


def judge(wait: Wait, peers: Peers, now_s: float) -> Notice | None:
    """Return why `wait` must end now, or None while there is hope. A fatal notice comes before anything else."""
    if peers.fatal is not None:
        return peers.fatal
    patience_s = peers.patience_s
    grace, silence = grace_s(patience_s), silence_s(patience_s)
    where = f"while {peers.name(peers.rank)} was {wait.doing} (step {wait.step})"

    def lost(rank: int, text: str) -> Notice:
        return Notice(kind="lost", rank=rank, reporter=peers.rank, text=text, step=wait.step, doing=wait.doing)

    for rank, notice in sorted(peers.left.items()):
        if rank != peers.rank and notice.succeeded.get(wait.channel, 0) < wait.number:
            return lost(
                rank,
                f"{_capital(peers.name(rank))} ended its script at step {notice.step} {where}. "
                f"Every rank must run the same number of steps and of group calls.",
            )
    if wait.broken_s is not None and now_s - wait.broken_s >= grace:
        if wait.broken_peer is None or wait.broken_peer == peers.rank:
            return lost(-1, f"The connections between the ranks broke {where}: {wait.broken_text}.")
        return lost(
            wait.broken_peer,
            f"{_capital(peers.name(wait.broken_peer))} closed its connection without a word {where} "
            f"({wait.broken_text}): it was killed or crashed. Look at its output, and at `dmesg` for the "
            f"out-of-memory killer.",
        )
    if peers.store_failed_s is not None and now_s - peers.store_failed_s >= grace:
        return lost(*_store_gone(peers, f"broke its connection {where}: it was killed or crashed."))
    if now_s - max(peers.beaten_s, wait.began_s) >= silence:
        return lost(*_store_gone(peers, f"did not answer for {silence:.3g} s {where} (patience_s={patience_s:g})."))
    # Ages are counted between two looks, so that a busy reader does not accuse others of silence.
    silent = {
        rank: peers.looked_s - sign.seen_s
        for rank, sign in peers.signs.items()
        if rank not in peers.left and peers.looked_s - sign.seen_s >= silence
    }
    if silent:
        rank = max(silent, key=lambda rank: (silent[rank], -rank))
        sign = peers.signs[rank]
        return lost(
            rank,
            f"{_capital(peers.name(rank))} gave no sign of life for {silent[rank]:.3g} s {where} "
            f"(patience_s={patience_s:g}): it is frozen, killed or unreachable. Last heard at step {sign.step}"
            f"{', ' + sign.doing if sign.doing else ''}.",
        )
    if now_s - wait.began_s >= 10 * patience_s:
        return lost(*_never_came(wait, peers, where, now_s - wait.began_s))
    return None


def error_from(notice: Notice, peers: Peers, doing: str) -> PeerError:
    """Return the error that this rank raises for a fatal `notice`; `origin_rank` is who prints it."""
    host = peers.hosts[notice.rank] if notice.rank >= 0 else ""
    rank = notice.rank if notice.rank >= 0 else None
    if notice.kind == "lost":
        text = notice.text
        if notice.rank == peers.rank:
            text += " That is this rank: the others gave it up and went on without it."
        error = PeerLost(text, rank=rank, host=host)
    else:
        verb = "was interrupted" if notice.kind == "interrupted" else "failed"
        while_doing = f" while {notice.doing}" if notice.doing else ""
        error = PeerFailed(
            f"{_capital(peers.name(notice.rank))} {verb} at step {notice.step}{while_doing}: {notice.text}. "
            f"{_capital(peers.name(peers.rank))} was {doing} and ends with it; "
            f"the traceback is in the output of rank {notice.rank}.",
            rank=rank,
            host=host,
        )
    error.origin_rank = notice.reporter
    return error


def different_calls(answers: Mapping[int, Frame], peers: Peers) -> str:
    """Return who makes which call, from the frames that have come for one and the same call, by rank."""
    ranks_by_kind: dict[int, list[int]] = {}
    for rank in sorted(answers):
        ranks_by_kind.setdefault(answers[rank].kind, []).append(rank)
    said = []
    for first, *more in ranks_by_kind.values():
        also = f" and rank {more[0]}" if len(more) == 1 else f" and {len(more)} more" if more else ""
        said.append(f"{peers.name(first)}{also} {'are' if more else 'is'} {answers[first].doing}")
    return (
        f"Ranks make different calls at the same point: {'; '.join(said)}. Every rank must make the same calls in the "
        f"same order: look for one that only some ranks make, as under `if rank == 0`."
    )


def described(error: BaseException) -> str:
    """Return type and text of `error` in one line, as notices carry it."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:2000]}" if text else type(error).__name__


def _store_gone(peers: Peers, what: str) -> tuple[int, str]:
    if peers.store_rank is None:
        return -1, f"The store at {peers.store_name} {what} Is the launcher still running?"
    return peers.store_rank, f"{_capital(peers.name(peers.store_rank))}, which hosts the store, {what}"


def _never_came(wait: Wait, peers: Peers, where: str, waited_s: float) -> tuple[int, str]:
    signs = sorted(peers.signs.items())
    behind = [(rank, sign) for rank, sign in signs if sign.submitted.get(wait.channel, 0) < wait.number]
    said = [f"{peers.name(rank)} at step {sign.step}: {sign.doing or 'unknown'}" for rank, sign in behind or signs]
    limit = f"{waited_s:.3g} s (10 x patience_s) {where}"
    if behind:
        return behind[0][0], f"No progress for {limit}. Still behind: {'; '.join(said)}."
    return -1, (
        f"No progress for {limit}, although every rank has come ({'; '.join(said)}). "
        f"Either the link is too slow (raise patience_s) or ranks make different calls."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
