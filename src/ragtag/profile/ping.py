"""Round trips between two ranks over a transport, payload both ways: one asks, the other answers until told to stop.

The one idea: every message is announced by a small fixed one, because both ends of a transport must agree on sizes.
"""

import time
from collections.abc import Callable

import torch

from ragtag.comm.transport import Transport

_TAG = 1 << 29
"""Of nobody else: rings count their tags up from 1."""
_STOP = -1


class Asker:
    """The end that measures; `close` tells the other one to stop."""

    def __init__(self, transport: Transport, peer: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._transport, self._peer, self._clock = transport, peer, clock
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)

    def round_trip(self, num_bytes: int) -> float:
        """Return the seconds until `num_bytes` have gone there and as many have come back, at the same time."""
        if self._sent.numel() < num_bytes:
            self._sent, self._received = torch.zeros(2, num_bytes, dtype=torch.uint8)
        announced, answer = torch.tensor([num_bytes]), torch.empty(1, dtype=torch.uint8)
        started_s = self._clock()
        coming, going = [], []
        if num_bytes:
            coming.append(self._transport.receive(self._received[:num_bytes], self._peer, _TAG))
        coming.append(self._transport.receive(answer, self._peer, _TAG))
        going.append(self._transport.send(announced, self._peer, _TAG))
        if num_bytes:
            going.append(self._transport.send(self._sent[:num_bytes], self._peer, _TAG))
        for each in coming:
            each.wait()
        taken_s = self._clock() - started_s
        for each in going:
            each.wait()
        return taken_s

    def close(self) -> None:
        """Tell the other end to stop answering."""
        self._transport.send(torch.tensor([_STOP]), self._peer, _TAG).wait()


def answer(transport: Transport, peer: int) -> None:
    """Answer rank `peer` until it says stop; every wait is bounded by the transport."""
    sent = received = torch.empty(0, dtype=torch.uint8)
    announced = torch.empty(1, dtype=torch.int64)
    while True:
        transport.receive(announced, peer, _TAG).wait()
        num_bytes = int(announced)
        if num_bytes == _STOP:
            return
        going = []
        if num_bytes:
            if sent.numel() < num_bytes:
                sent, received = torch.zeros(2, num_bytes, dtype=torch.uint8)
            coming = transport.receive(received[:num_bytes], peer, _TAG)
            going.append(transport.send(sent[:num_bytes], peer, _TAG))
            coming.wait()
        going.append(transport.send(torch.zeros(1, dtype=torch.uint8), peer, _TAG))
        for each in going:
            each.wait()
