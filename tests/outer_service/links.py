"""A link that can be cut, stalled, or made to change bytes; and an island that says whatever a test wants."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from ragtag.outer.protocol import Attach, Frame, Offer, Ready, Wanted, from_hub, pack
from ragtag.outer.transfer import digest, pieces
from tests.outer_service.running import LONG_S, TOKEN, VERSION

F = TypeVar("F", bound=Frame)


class Link:
    """Forwards connections to `port` of this machine."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open = threading.Event()
        self._open.set()
        self._flowing = threading.Event()
        self._flowing.set()
        self._ended = False
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.change: Callable[[bytes], bytes] = lambda data: data
        """What becomes of bytes on their way to the hub."""
        self.passed = 0
        """Bytes towards the hub."""
        self.limit: int | None = None
        """The link is cut once so many bytes have passed."""
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections, and let no other one through."""
        self._open.clear()
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Let connections through again."""
        self.limit = None
        self._open.set()

    def stall(self) -> None:
        """Nothing passes, and nothing breaks."""
        self._flowing.clear()

    def flow(self) -> None:
        """What was held up passes."""
        self._flowing.set()

    def close(self) -> None:
        self._ended = True
        self.cut()
        self.flow()
        self._listener.close()

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self._open.is_set():
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._to))
                with self._lock:
                    self._sockets |= {near, far}
                threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, to_hub: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                self._flowing.wait()
                if to_hub:
                    self.passed += len(data)
                    data = self.change(data)
                target.sendall(data)
                if to_hub and self.limit is not None and self.passed > self.limit:
                    self.cut()
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
            with self._lock:
                self._sockets.discard(each)


class Raw:
    """A connection to the outer loop on which any message can be said."""

    def __init__(self, port: int, name: str = "raw", *, numel=(300, 7), attach: bool = True, **about) -> None:
        self.name = name
        self._stack = contextlib.ExitStack()
        opened = connect(
            f"ws://127.0.0.1:{port}/outer",
            additional_headers={"Authorization": f"Bearer {TOKEN}"},
            proxy=None,
            compression=None,
            max_size=None,
        )
        self.connection: ClientConnection = self._stack.enter_context(opened)
        fields = {"run": "r", "version": VERSION, "model": "m", "numel": numel, "batch": 8, "wanted": Wanted(), **about}
        if attach:
            self.say(Attach(island=name, session=f"session-of-{name}", **fields))

    def say(self, frame: Frame, payload: bytes | memoryview = b"") -> None:
        self.connection.send(pack(frame, payload))

    def hear(self, kind: type[F]) -> F:
        """The next frame of this kind."""
        while True:
            message = self.connection.recv(timeout=LONG_S)
            frame, _ = from_hub(message if isinstance(message, bytes) else message.encode())
            if isinstance(frame, kind):
                return frame

    def offer(self, delta: torch.Tensor, *, fragment: int = 0, base: int = 1, sequence: int = 1, **about) -> Offer:
        """Offer a delta in fp32, and send it if the hub wants it."""
        data = delta.numpy().tobytes()
        fields = {"tokens": 8.0, "samples": 8, "steps": 1, "key": f"{self.name}/{fragment}/{sequence}", **about}
        offer = Offer(
            kind="delta",
            fragment=fragment,
            base=base,
            sequence=sequence,
            codec="fp32",
            num_bytes=len(data),
            digest=digest(data),
            **fields,
        )
        self.say(offer)
        return offer

    def send(self, delta: torch.Tensor, **about) -> None:
        """The same, and all of its pieces."""
        offer = self.offer(delta, **about)
        ready = self.hear(Ready)
        for piece, payload in pieces(offer.key, delta.numpy().tobytes(), ready.offset):
            self.say(piece, payload)

    def await_close(self) -> str:
        """Wait until the hub has closed the connection; return the reason it gave."""
        try:
            while True:
                self.connection.recv(timeout=LONG_S)
        except ConnectionClosed as error:
            return error.rcvd.reason if error.rcvd else ""

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
