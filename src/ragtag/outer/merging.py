"""All fragments of the model at the hub: what has been contributed to each, when it is merged, what is on disk of it.

The one idea: a fragment is merged by itself, whatever the others do, and a new version of it exists for islands only
once it is on disk.
"""

from collections.abc import Callable, Collection, Mapping

import msgspec
import torch

from ragtag.outer import rounds
from ragtag.outer.codec import BLOCK, WorthlessDelta, decode, encoded_bytes
from ragtag.outer.protocol import Codec, Fetch, Offer, Tempo
from ragtag.outer.store import Kept, Model, Store
from ragtag.outer.values import FragmentValues
from ragtag.watch.events import Contributed, Event, Exchanged

_KEPT_UPDATES = 4
"""Merges back that an island may be and still need only what they changed."""


class Fragment:
    """One fragment, and the merge of it that is under way."""

    def __init__(self, values: FragmentValues, merged: Mapping[str, int]) -> None:
        self.values = values
        self.merged = dict(merged)
        """By island, the newest of its deltas in the values."""
        self.whole = dict(merged)
        """By island, the newest of its deltas that has come whole."""
        self.round: rounds.Round | None = None
        self.parts: list[Contributed] = []
        self.sequences: dict[str, int] = {}
        self.samples = 0
        self.updates: dict[int, tuple[Codec, Kept]] = {}
        """By version, what it has changed."""


class Merging:
    """The fragments of one run.

    Args:
        store: what was there before, and what is written.
        patience_s: bounds every wait, in seconds.
        tell: told events for the log.
        clock: seconds that only ever grow.
    """

    def __init__(
        self, store: Store, *, patience_s: float, tell: Callable[[Event], None], clock: Callable[[], float]
    ) -> None:
        self._store, self._patience_s, self._tell, self._clock = store, patience_s, tell, clock
        self.fragments: dict[int, Fragment] = {}
        for number, record in store.versions.items():
            values, momentum = store.load(number)
            self.fragments[number] = Fragment(FragmentValues(values, momentum, record.version), record.merged)
        self._spare: torch.Tensor | None = None
        """What contributions are decoded into: fresh memory is handed out page by page, which takes as long again."""
        self.step = max((each.step for each in store.versions.values()), default=0.0)
        """Steps of all islands together, by samples."""

    @property
    def islands(self) -> set[str]:
        """Those that have contributed to any version."""
        return {name for fragment in self.fragments.values() for name in fragment.merged}

    @property
    def under_way(self) -> bool:
        """Whether anything has come that is not merged yet."""
        return any(fragment.round is not None for fragment in self.fragments.values())

    def version(self, number: int) -> int:
        """Of a fragment; 0: it has no values yet."""
        return self.fragments[number].values.version if number in self.fragments else 0

    def whole(self, number: int, island: str) -> int:
        """Which of an island's deltas of a fragment is the newest that has come whole."""
        return self.fragments[number].whole.get(island, 0) if number in self.fragments else 0

    def begin_with(self, number: int, values: torch.Tensor, step: int) -> None:
        """These are the values that all islands begin with. Raises WorthlessDelta where they are not finite."""
        if not bool(torch.isfinite(values).all()):
            raise WorthlessDelta("it holds numbers that are not finite")
        self._store.keep(number, 1, values, torch.zeros_like(values), merged={}, step=step)
        self.fragments[number] = Fragment(FragmentValues(values), {})

    def why_worthless(self, island: str, offer: Offer, model: Model) -> str:
        """Why a delta that is offered is not even looked at; empty: it may come."""
        fragment, number = self.fragments[offer.fragment], offer.fragment
        if offer.sequence <= fragment.whole.get(island, 0):
            return f"its delta {offer.sequence} of fragment {number} has come before: a replayed message"
        if fragment.round is not None and island in fragment.round.weights:
            return f"it has contributed to version {fragment.values.version + 1} of fragment {number} already"
        return why_wrong_size(offer, model)

    def contribute(
        self, island: str, offer: Offer, data: memoryview, model: Model, present: Collection[str], *, dataset: int
    ) -> bool:
        """Count a delta; return whether it is the first of its round. Raises WorthlessDelta where it is none.

        Args:
            present: islands that merges wait for.
            dataset: samples of the island's data.
        """
        fragment = self.fragments[offer.fragment]
        fragment.whole[island] = offer.sequence
        age = fragment.values.version - offer.base
        if self._spare is None:
            self._spare = torch.empty(-(-max(model.numel) // BLOCK) * BLOCK)
        delta = decode(offer.codec, data, model.numel[offer.fragment], out=self._spare)
        weight = fragment.values.add(
            delta,
            tokens=offer.tokens,
            steps=offer.steps,
            base=offer.base,
            pinned=dataset if model.data == "local" else 0,
            oldest=model.wanted.oldest,
        )
        is_first = fragment.round is None
        fragment.round = rounds.contributed(
            fragment.round, island, weight, present=len(present), now_s=self._clock(), final=offer.final
        )
        fragment.sequences[island] = offer.sequence
        fragment.samples += offer.samples
        part = Contributed(
            island=island,
            weight=weight,
            tokens=offer.tokens,
            age=age,
            sent_bytes=len(data),
            plain_bytes=4 * delta.numel(),
        )
        fragment.parts.append(part)
        return is_first

    def due(self, number: int, present: Collection[str], tempo: Tempo, inner_s: float) -> str:
        """Why a fragment is to be merged now, in words; empty: it is not."""
        round_ = self.fragments[number].round
        if round_ is None:
            return ""
        if tempo.asynchronous:
            return "it has come"
        return rounds.why_closed(
            round_,
            present,
            inner_steps=tempo.inner_steps,
            inner_s=inner_s,
            patience_s=self._patience_s,
            now_s=self._clock(),
        )

    def merge(self, number: int, reason: str, tempo: Tempo, *, momentum: float, part: float, batch: int) -> None:
        """Merge what has been contributed, and write it down.

        Args:
            momentum: of the outer optimizer.
            part: of what is merged, how much it counts: 1, but where each island's is merged by itself.
            batch: samples of a step of all islands together.
        """
        fragment = self.fragments[number]
        round_, values = fragment.round, fragment.values
        assert round_ is not None, "nothing has come"
        codec: Codec = "fp32" if round_.final else tempo.codec
        data, norm = values.close(rate=tempo.rate * part, momentum=momentum, codec=codec, spare=self._spare)
        fragment.merged.update(fragment.sequences)
        if number == 0:
            self.step += fragment.samples / batch
        self._store.keep(number, values.version, values.values, values.momentum, merged=fragment.merged, step=self.step)
        fragment.updates[values.version] = codec, self._store.keep_update(number, values.version, data)
        older = fragment.updates.pop(values.version - _KEPT_UPDATES, None)
        if older is not None:
            older[1].path.unlink(missing_ok=True)
        total = sum(round_.weights.values())
        self._tell(
            Exchanged(
                fragment=number,
                version=values.version,
                islands=tuple(msgspec.structs.replace(each, weight=each.weight / total) for each in fragment.parts),
                inner_steps=tempo.inner_steps,
                took_s=self._clock() - round_.began_s,
                reason=reason,
                norm=norm,
            )
        )
        fragment.round, fragment.parts, fragment.sequences, fragment.samples = None, [], {}, 0

    def found(self, fetch: Fetch) -> tuple[int, Codec, Kept] | None:
        """Version, codec and bytes of values, or of what a version has changed; None: they are not there."""
        fragment = self.fragments.get(fetch.fragment)
        if fragment is None:
            return None
        if fetch.kind == "theta":
            return fragment.values.version, "fp32", self._store.values_of(fetch.fragment)
        if fetch.kind != "update" or fetch.version not in fragment.updates:
            return None
        return fetch.version, *fragment.updates[fetch.version]


def why_wrong_size(offer: Offer, model: Model) -> str:
    """Why what is offered cannot be numbers of its fragment; empty: it can."""
    numel = model.numel[offer.fragment]
    codec: Codec = offer.codec if offer.kind == "delta" else "fp32"
    expected = encoded_bytes(codec, numel)
    if offer.num_bytes == expected:
        return ""
    size = f"{offer.num_bytes} bytes of {codec}"
    return f"{size} where fragment {offer.fragment} of {numel} numbers takes {expected}: a wrong shape"
