"""Which emulated device this worker is: RAGTAG_EMULATE names a cluster file, the rank picks the device.

The one idea: an `Emulator` is three seams (pace, memory, link) for one rank; without the variable there is none, and
production code runs with their do-nothing twins.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragtag.core.cluster import Cluster, Device, Link
from ragtag.core.cluster_file import load_cluster
from ragtag.core.errors import SettingError
from ragtag.core.quantities import format_bandwidth, format_bytes
from ragtag.emulate.link import LimitedTransport, queues_to_peers
from ragtag.emulate.link_queue import LinkQueue, LocalQueue, SharedQueue, can_share
from ragtag.emulate.memory import MemoryCap, MemoryLimit, NoMemoryLimit
from ragtag.emulate.pace import DevicePace, NoPace, Pace
from ragtag.emulate.quota import hold_to
from ragtag.emulate.schedule import DeviceSchedule

VARIABLE = "RAGTAG_EMULATE"


def from_environment(environ: Mapping[str, str], rank: int) -> "Emulator | None":
    """Return the emulator of `rank`, or None where RAGTAG_EMULATE is unset or empty.

    A device with a CPU quota puts this process under it from now on.

    Raises:
        SettingError: the file is not valid, it has fewer devices than ranks, or it asks for speeds without a pace.
        QuotaError: this machine does not let us set CPU quotas.
    """
    path = environ.get(VARIABLE, "").strip()
    if not path:
        return None
    run = environ.get("RAGTAG_HUB") or f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
    try:
        emulator = Emulator(load_cluster(path), rank, run=run)
        if emulator.device.cpu_percent is not None:
            hold_to(emulator.device.cpu_percent)
    except SettingError as error:
        raise SettingError(f"{error} (from the environment variable {VARIABLE} = '{path}')") from None
    return emulator


class Emulator:
    """Makes rank `rank` look like the device of that number in `cluster`.

    Args:
        cluster: its devices, expanded, are the ranks.
        rank: this worker's.
        run: tells this run's shared links from those of other runs on this machine.

    Raises:
        SettingError: more ranks than devices, or speeds without a pace.
    """

    def __init__(self, cluster: Cluster, rank: int, *, run: str = "") -> None:
        devices = cluster.expanded()
        if rank >= len(devices):
            raise SettingError(
                f"Rank {rank} has no device to be: the cluster file describes {len(devices)}. "
                f"Start {len(devices)} workers, or add a [[device]] or a count."
            )
        self.cluster = cluster
        self.device: Device = devices[rank]
        self._rank = rank
        self._hosts = tuple(device.host for device in devices)
        self._run = run
        self._files: list[Path] = []
        self._queues: dict[str, LinkQueue] = {}
        self._by_peer: dict[int, LinkQueue] | None = None
        self.pace: Pace = _pace(self.device, cluster)
        """For the regions of a step."""
        self.memory: MemoryLimit = NoMemoryLimit()
        """For forward and backward."""
        if self.device.memory_bytes is not None:
            self.memory = MemoryCap(self.device.memory_bytes, device=self.device.name)

    def limit_transport(self, transport: Any, devices: Sequence[int | None] | None = None) -> Any:
        """Return `transport`, with messages to other hosts as slow as the links say; itself where nothing is slow.

        All transports of this rank that were passed here share the links, and so do ranks on one host.

        Args:
            transport: of this rank.
            devices: which device of the cluster each rank is, None: none of them; by default its own number.
        """
        links = self._queues_to_peers()
        numbers = range(transport.world_size) if devices is None else devices
        queues = {peer: links[number] for peer, number in enumerate(numbers) if number is not None and number in links}
        return LimitedTransport(transport, queues) if queues else transport

    def message_delay_s(self, peer: int, num_bytes: int) -> float:
        """Return for how many seconds a message to device number `peer`, handed over now, is on the links that
        transports share.

        Its turn behind other messages, bytes / bandwidth, and the latency; 0 where nothing is slow.
        """
        queue = self._queues_to_peers().get(peer)
        now_s = time.monotonic()
        return queue.reserve(now_s, num_bytes) - now_s if queue is not None else 0.0

    @property
    def devices(self) -> tuple[tuple[str, str, str], ...]:
        """Name, host and kind of all devices, by rank; equal kinds are equally fast."""
        return tuple((each.name, each.host, f"{each.kind} of speed {each.speed:g}") for each in self.cluster.expanded())

    def describe(self) -> str:
        """One line that says what this rank pretends to be."""
        device, emulation = self.device, self.cluster.emulation
        parts = []
        if emulation.sample_s is not None:
            parts.append(f"speed {device.speed:g}, {1e3 * emulation.sample_s / device.speed:g} ms a sample")
        else:
            parts.append("speed not emulated")
        changes = [name for name in ("drift", "flip", "stall") if getattr(device, name)]
        if changes:
            parts.append(f"with {' and '.join(changes)}")
        if device.cpu_percent is not None:
            parts.append(f"{device.cpu_percent:g} % of a core")
        if device.memory_bytes is not None:
            parts.append(f"memory {format_bytes(device.memory_bytes)}")
        for link in self.cluster.links:
            if device.host in link.between:
                other = link.between[link.between[0] == device.host]
                bandwidth = link.bandwidth_bytes_per_s
                speed = "no limit" if bandwidth is None else format_bandwidth(bandwidth)
                parts.append(f"{speed} and {1e3 * link.latency_s:g} ms to {other}")
        return f"rank {self._rank} pretends to be {device.name} on {device.host}: {', '.join(parts)}"

    def close(self) -> None:
        """Remove what links between several processes were kept in."""
        for file in self._files:
            file.unlink(missing_ok=True)
        self._files = []

    def _queues_to_peers(self) -> dict[int, LinkQueue]:
        if self._by_peer is None:
            self._by_peer = queues_to_peers(self._hosts, self._rank, self.cluster.link_between, self._queue)
        return self._by_peer

    def _queue(self, link: Link, host: str) -> LinkQueue:
        if host in self._queues:
            return self._queues[host]
        if self._hosts.count(self.device.host) > 1 and can_share():
            name = hashlib.blake2b(f"{self._run}|{self.device.host}|{host}".encode(), digest_size=8).hexdigest()
            file = Path(tempfile.gettempdir()) / f"ragtag-emulate-{os.getuid()}" / name
            self._files.append(file)
            self._queues[host] = SharedQueue(link, file)
        else:
            self._queues[host] = LocalQueue(link)
        return self._queues[host]


def _pace(device: Device, cluster: Cluster) -> Pace:
    emulation = cluster.emulation
    if emulation.sample_s is not None:
        return DevicePace(DeviceSchedule(device=device, emulation=emulation))
    changes = any(other.speed != 1 or other.drift or other.flip or other.stall for other in cluster.devices)
    costs = emulation.micro_batch_s or emulation.optimizer_s or emulation.fixed_s or emulation.jitter
    if changes or costs:
        raise SettingError(
            "The cluster file gives speeds or costs of work, but not what they are relative to. Say what forward and "
            "backward of one sample take at speed 1, at least about 5 times of what they take here: "
            "[emulate] and below it sample_ms = 40."
        )
    return NoPace()
