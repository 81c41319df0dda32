"""What the doctor knows about a host and about a pair of hosts, as plain values that travel as JSON.

The one idea: facts carry no judgement. Every field that may be unknown has a default, so that a peer with another
version of ragtag can still be read and its version be named.
"""

from collections.abc import Mapping

import msgspec


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """One network interface with its IPv4 and IPv6 addresses, numbers only and without a zone."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    mtu: int = 0


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device that can train."""

    kind: str
    """ "cuda", "rocm" or "cpu"."""
    name: str
    index: int = 0
    """As the driver's tool counts, which may differ from CUDA's order."""
    uuid: str = ""
    memory_bytes: int = 0
    driver: str = ""
    capability: str = ""
    """CUDA's compute capability, like "8.6"; empty: not known or none."""
    dtypes: tuple[str, ...] = ("fp32",)
    """What it computes in hardware."""


class Torch(msgspec.Struct, frozen=True, kw_only=True):
    """What `import torch` found, in a process of its own."""

    version: str = ""
    """Empty: torch could not be imported."""
    problem: str = ""
    """Why there is no answer, or why it sees no accelerator."""
    devices: tuple[Device, ...] = ()
    architectures: tuple[str, ...] = ()
    """What its kernels are compiled for: "sm_80", "compute_90"."""


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A port that training would listen on here."""

    number: int
    setting: str
    """Which variable asks for it; empty: torchrun's default."""
    free: bool
    holder: str = ""
    """Who has it, as "python (pid 123)"; empty: not known."""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One host as its own doctor sees it."""

    host: str
    ragtag: str = ""
    python: str = ""
    system: str = ""
    torch: Torch = Torch()
    devices: tuple[Device, ...] = ()
    """Accelerators, as the driver or else torch names them; where there is none, the CPU."""
    cores: int = 0
    cores_allowed: int = 0
    """CPU affinity of this process."""
    cpu_quota_cores: float | None = None
    """Cores' worth of time that the cgroup allows; None: no limit."""
    memory_bytes: int = 0
    memory_limit_bytes: int | None = None
    """The cgroup's; None: no limit."""
    open_files: int = 0
    """Soft limit; 0: not known."""
    open_files_most: int = 0
    """Hard limit: what `ulimit -n` may ask for; 0: not known."""
    shared_memory_bytes: int | None = None
    """Size of /dev/shm; None: there is none, or this system needs none."""
    resolves_to: tuple[str, ...] = ()
    """Addresses that the host's own name has here."""
    master_resolves_to: tuple[str, ...] = ()
    """Addresses that MASTER_ADDR has here."""
    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()
    environment: Mapping[str, str] = {}
    """Variables that steer devices, threads and the network; only those that are set."""
    remarks: tuple[str, ...] = ()
    """What could not be looked at, in words."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One try to talk from one host to another."""

    source: str
    target: str
    address: str
    """Where the source called: what was typed if it did not resolve, numbers otherwise."""
    port: int
    interface: str = ""
    """The source's interface that routes there; empty: none does."""
    source_address: str = ""
    ok: bool
    stage: str = ""
    """How far it came, if not `ok`: "resolve", "connect", "answer", "token", "bulk".

    "report": the source itself went silent, and whether there is a way is not known.
    """
    error: str = ""
    refused: bool = False
    """Whether the other host answered that nothing listens there."""
    control: bool = False
    """Whether this called the doctor's own port; otherwise one that the system chose, as training's are."""
    latency_s: float | None = None
    """Half of the quickest round trip."""


class ClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """How far a host's clock is ahead of the caller's, in seconds, give or take `uncertainty_s`."""

    host: str
    offset_s: float
    uncertainty_s: float


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing a person should know."""

    severity: str
    """ "error": stops training; "warning": may hurt; "note": good to know."""
    code: str
    """Stable name of the rule, for scripts."""
    where: str
    """Host or pair of hosts."""
    what: str
    todo: str
    """What to type next."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """All that one `ragtag doctor` found; errors first among the findings."""

    ok: bool
    """No finding is an error."""
    findings: tuple[Finding, ...]
    hosts: tuple[HostFacts, ...]
    """This host first."""
    ways: tuple[Way, ...] = ()
    clocks: tuple[ClockOffset, ...] = ()
    elapsed_s: float = 0.0
