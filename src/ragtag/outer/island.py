"""What an island knows of the outer loop: values as the hub has them, what it has sent, what is to be added here.

The one idea: an island's own values are the hub's, less what it has sent and the hub has not merged yet, plus what it
has done since. So whatever arrives is *added*: what the merge has changed and, where the island's own delta is in it,
that delta too, for then own values and the merge count it twice. Nothing is ever overwritten (w += Theta - sent, as in
LOSCAR, arXiv 2605.20866; overwriting or mixing late results did worse in our study). No sockets here.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragtag.outer.codec import decode, encode
from ragtag.outer.protocol import Codec, Offer
from ragtag.outer.transfer import digest


@dataclass
class InFlight:
    """A delta that was sent, or is to be, and is in no version that this island has."""

    offer: Offer
    data: bytes | memoryview
    delta: torch.Tensor
    taken: bool = False
    """All of it is at the hub."""


class IslandValues:
    """All fragments, as one island sees them.

    Args:
        island: its name.
        session: of the process that leads it.
    """

    def __init__(self, island: str, session: str = "") -> None:
        self.island, self.session = island, session or secrets.token_hex(8)
        self.values: list[torch.Tensor] = []
        """By fragment, what the hub has, as far as it has come here; fp32 in host memory."""
        self.versions: list[int] = []
        self.in_flight: dict[int, InFlight] = {}
        self._sequences: list[int] = []
        self._bases: dict[int, tuple[torch.Tensor, int]] = {}
        """By fragment that is about to be sent, the values and the version it is compared with."""
        self._arrived: dict[int, list[torch.Tensor]] = {}
        """By fragment, what is to be added to own values, oldest first."""
        self._coming: dict[int, list[torch.Tensor]] = {}
        """By fragment, changes of versions that are here, while newer ones are not."""

    @property
    def begun(self) -> bool:
        """Whether it has values of all fragments."""
        return bool(self.versions)

    def begin(self, values: Sequence[torch.Tensor], versions: Sequence[int], sequences: Sequence[int]) -> None:
        """Own values are these, at these versions."""
        self.values, self.versions = list(values), list(versions)
        self._sequences = list(sequences)
        self.in_flight, self._arrived, self._coming, self._bases = {}, {}, {}, {}

    # Sending

    def reserve(self, fragment: int) -> bool:
        """Begin to send a fragment whose own values are read now; False: something of it is on its way.

        The difference is then that to the hub's values as they are at this moment, whatever arrives until it is taken.
        """
        if self.is_busy(fragment):
            return False
        self._bases[fragment] = self.values[fragment], self.versions[fragment]
        return True

    def is_busy(self, fragment: int) -> bool:
        """Whether something of this fragment is on its way, in either direction."""
        return any(fragment in each for each in (self._bases, self.in_flight, self._arrived, self._coming))

    def send(
        self,
        fragment: int,
        own: torch.Tensor,
        *,
        tokens: float,
        samples: int,
        steps: int,
        step: int,
        codec: Codec,
        final: bool = False,
    ) -> InFlight:
        """Take the difference of the hub's values, as they were when it was reserved, and `own` (1-d fp32; changed)."""
        values, version = self._bases.pop(fragment)
        delta = torch.sub(values, own, out=own)
        data = encode(codec, delta)
        self._sequences[fragment] += 1
        sequence = self._sequences[fragment]
        offer = Offer(
            key=f"{self.session}/{fragment}/{sequence}",
            kind="delta",
            fragment=fragment,
            base=version,
            sequence=sequence,
            tokens=tokens,
            samples=samples,
            steps=steps,
            codec=codec,
            num_bytes=len(data),
            digest=digest(data),
            final=final,
            step=step,
        )
        self.in_flight[fragment] = InFlight(offer, data, delta)
        return self.in_flight[fragment]

    def attached(self, versions: Sequence[int], sequences: Sequence[int]) -> list[int]:
        """What the hub says it has when this island comes (again); return fragments whose delta is to be sent again."""
        again = []
        for fragment, sequence in enumerate(sequences):
            flight = self.in_flight.get(fragment)
            if flight is not None and flight.offer.sequence > sequence:
                flight.taken = False
                again.append(fragment)
            self._sequences[fragment] = max(self._sequences[fragment], sequence)
        return again

    def refused(self, fragment: int, key: str) -> None:
        """The hub does not count a delta: what is in it stays in own values, and in the next delta."""
        flight = self.in_flight.get(fragment)
        if flight is not None and flight.offer.key == key:
            del self.in_flight[fragment]

    # Arriving

    def update(self, fragment: int, version: int, data: memoryview, codec: Codec) -> None:
        """The next version's change has come. Raises WorthlessDelta where it does not fit."""
        assert version == self.versions[fragment] + 1, "versions come one after the other"
        change = decode(codec, data, self.values[fragment].numel())
        self.values[fragment] = self.values[fragment] + change  # not in place: what is being sent refers to it
        self._come(fragment, version, change)

    def replace(self, fragment: int, version: int, data: memoryview) -> None:
        """Values of a version have come whole, since what lies between is no longer there."""
        values = decode("fp32", data, self.values[fragment].numel())
        change = values - self.values[fragment]
        self.values[fragment] = values
        self._come(fragment, version, change)

    def _come(self, fragment: int, version: int, change: torch.Tensor) -> None:
        self.versions[fragment] = version
        self._coming.setdefault(fragment, []).append(change)

    def arrive(self, fragment: int, merged: int) -> bool:
        """The newest version is here, with own deltas up to `merged` in it; return whether there is anything to add."""
        changes = self._coming.pop(fragment, [])
        if not changes:
            return False
        flight = self.in_flight.get(fragment)
        correction = changes[0]
        for change in changes[1:]:
            correction += change
        if flight is not None and merged >= flight.offer.sequence:
            correction = correction + flight.delta
            del self.in_flight[fragment]
        self._arrived.setdefault(fragment, []).append(correction)
        return True

    @property
    def arrivals(self) -> dict[int, torch.Tensor]:
        """By fragment, what is to be added to own values now."""
        return {fragment: changes[0] for fragment, changes in self._arrived.items() if changes}

    def waiting(self, fragment: int) -> int:
        """How many arrivals of a fragment are to be added."""
        return len(self._arrived.get(fragment, ()))

    def added(self, fragments: Sequence[int]) -> None:
        """What `arrivals` said of these was added."""
        for fragment in fragments:
            self._arrived[fragment].pop(0)
            if not self._arrived[fragment]:
                del self._arrived[fragment]
