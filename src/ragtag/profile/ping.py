"""Round trips between two ranks over a transport: one asks, the other answers until it is told to stop.

The one idea: every message is announced by a small fixed one, because both ends of a transport must agree on sizes.
"""

import time
from collections.abc import Callable

import torch

from ragtag.comm.transport import Transport

_TAG = 1 << 29
"""Of nobody else: rings count their tags up from 1."""
_STOP, _THERE, _BACK = 0, 1, 2


class Asker:
    """The end that measures; `close` tells the other one to stop."""

    def __init__(self, transport: Transport, peer: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._transport, self._peer, self._clock = transport, peer, clock
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def round_trip(self, num_bytes: int, back: bool) -> float:
        """Return the seconds until `num_bytes` went there (or came back) and everything is answered."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        payload = self._buffer[:num_bytes]
        announced = torch.tensor([_BACK if back else _THERE, num_bytes])
        answer = payload if back and num_bytes else torch.empty(1, dtype=torch.uint8)
        started_s = self._clock()
        pending = [self._transport.receive(answer, self._peer, _TAG)]
        pending.append(self._transport.send(announced, self._peer, _TAG))
        if num_bytes and not back:
            pending.append(self._transport.send(payload, self._peer, _TAG))
        pending[0].wait()
        taken_s = self._clock() - started_s
        for each in pending[1:]:
            each.wait()
        return taken_s

    def close(self) -> None:
        """Tell the other end to stop answering."""
        self._transport.send(torch.tensor([_STOP, 0]), self._peer, _TAG).wait()


def answer(transport: Transport, peer: int) -> None:
    """Answer rank `peer` until it says stop; every wait is bounded by the transport."""
    buffer = torch.empty(0, dtype=torch.uint8)
    announced = torch.empty(2, dtype=torch.int64)
    while True:
        transport.receive(announced, peer, _TAG).wait()
        kind, num_bytes = announced.tolist()
        if kind == _STOP:
            return
        if buffer.numel() < num_bytes:
            buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        if kind == _BACK and num_bytes:
            transport.send(buffer[:num_bytes], peer, _TAG).wait()
            continue
        if num_bytes:
            transport.receive(buffer[:num_bytes], peer, _TAG).wait()
        transport.send(torch.zeros(1, dtype=torch.uint8), peer, _TAG).wait()
