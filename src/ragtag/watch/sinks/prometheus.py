"""The newest numbers at /metrics, for Prometheus to collect."""

import logging

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from ragtag.watch.events import AnyEvent, Members, Step, Verdict, Vitals

log = logging.getLogger("ragtag")

_STEP = {
    "step": "Number of the newest committed step.",
    "loss": "Loss of the newest step.",
    "lr": "Learning rate of the newest step.",
    "step_seconds": "Seconds that the newest step took.",
    "samples_per_second": "Of all devices together, in the newest step.",
    "eta": "Part of the devices' summed speed that the newest step made use of.",
    "communication_seconds": "Seconds of the newest step that even the last rank waited for the sum.",
    "members": "Ranks that train.",
}
_DEVICE = {
    "share": "Samples of the newest step.",
    "compute_seconds": "In forward and backward in the newest step.",
    "data_seconds": "Waiting for data in the newest step.",
    "wait_seconds": "Waiting for slower ranks in the newest step.",
    "memory_bytes": "In use.",
    "temperature_celsius": "Of the device.",
    "adds": "Steps a second with this device over those without it, less 1.",
}


class Prometheus:
    """Serves gauges on this machine's loopback.

    Args:
        port: 0: any, which is said.
        address: where to listen.

    Raises:
        OSError: the port is taken.
    """

    name = "Prometheus"

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        registry = CollectorRegistry()
        self._step = {name: Gauge(f"ragtag_{name}", text, registry=registry) for name, text in _STEP.items()}
        self._device = {
            name: Gauge(f"ragtag_device_{name}", text, ["device", "host"], registry=registry)
            for name, text in _DEVICE.items()
        }
        self._members: tuple[tuple[str, str], ...] = ()
        self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        self.port: int = self._server.server_port
        log.info("metrics for Prometheus at http://%s:%d/metrics", address, self.port)

    def take(self, event: AnyEvent) -> None:
        """Set what the event is the newest word on."""
        if isinstance(event, Members):
            for gauge in self._device.values():
                gauge.clear()  # of those that have left
            self._members = tuple((member.name, member.host) for member in event.ranks)
            self._step["members"].set(len(event.ranks))
        elif isinstance(event, Step):
            self._take_step(event)
        elif isinstance(event, Vitals):
            self._by_device("memory_bytes", event.memory_bytes)
            self._by_device("temperature_celsius", event.temperature_c)
        elif isinstance(event, Verdict):
            self._by_device("adds", tuple(worth.gain for worth in event.devices))

    def _take_step(self, step: Step) -> None:
        rate = step.samples / step.wall_s if step.wall_s else 0.0
        for name, value in (
            ("step", step.number),
            ("loss", step.loss),
            ("lr", step.lr),
            ("step_seconds", step.wall_s),
            ("samples_per_second", rate),
            ("eta", step.eta),
            ("communication_seconds", step.comm_s),
        ):
            self._step[name].set(float("nan") if value is None else value)
        self._by_device("share", step.shares)
        self._by_device("compute_seconds", step.compute_s)
        self._by_device("data_seconds", step.data_s)
        self._by_device("wait_seconds", step.wait_s)

    def _by_device(self, what: str, values: tuple[float, ...]) -> None:
        for (name, host), value in zip(self._members, values):
            self._device[what].labels(name, host).set(value)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
