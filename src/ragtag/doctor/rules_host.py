"""Findings about one host, from its facts alone: devices, torch, limits, variables, names, ports.

The one idea: a pure function of plain values, so that every rule is tested without the machine it is about. An error
is what stops training; each finding ends with what to type.
"""

from collections.abc import Iterator

from ragtag.core.quantities import format_bytes
from ragtag.doctor.facts import Finding, HostFacts, Interface
from ragtag.doctor.interfaces import is_loopback, leads_elsewhere

_ENOUGH_OPEN_FILES = 4096
"""Each rank has a socket per other rank and channel, each loader worker some pipes and shared memory files."""
_ENOUGH_SHARED_MEMORY_BYTES = 512 << 20
"""A container's usual 64 MB is gone after a few batches of images; a loader worker then dies of a bus error."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def host_findings(facts: HostFacts, *, several_hosts: bool) -> tuple[Finding, ...]:
    """Return what is wrong on one host; `several_hosts`: training is to run on others, too."""
    return (
        *_torch(facts),
        *_devices(facts),
        *_limits(facts),
        *_names(facts, several_hosts),
        *_interface_variables(facts, several_hosts),
        *_ports(facts),
        *(
            _finding(facts, "note", "not-seen", remark, "nothing, unless you miss something above")
            for remark in facts.remarks
        ),
    )


def chosen_interfaces(variable: str, value: str, known: tuple[Interface, ...]) -> tuple[Interface, ...]:
    """Return which of `known` a variable's `value` chooses.

    gloo and TensorPipe take whole names. NCCL takes prefixes, "=" before whole names, "^" before what to leave out
    (NCCL user guide, NCCL_SOCKET_IFNAME).
    """
    if variable != "NCCL_SOCKET_IFNAME":
        return tuple(each for each in known if each.name in value.split(","))
    exclude, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    words = [word for word in value.lstrip("^").lstrip("=").split(",") if word]
    return tuple(
        each
        for each in known
        if any(each.name == word if exact else each.name.startswith(word) for word in words) != exclude
    )


def _torch(facts: HostFacts) -> Iterator[Finding]:
    torch = facts.torch
    if not torch.version:
        what = torch.problem or "torch was not looked at"
        yield _finding(facts, "error", "torch-missing", what, "python -c 'import torch'   (pip install torch)")
        return
    if torch.problem:
        yield _finding(facts, "error", "torch-problem", torch.problem, "nvidia-smi   (then `sudo dmesg | tail`)")
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    on_purpose = visible is not None or "HIP_VISIBLE_DEVICES" in facts.environment
    driver = [device for device in facts.devices if device.kind == "cuda"]
    if driver and not torch.devices and not torch.problem and not on_purpose:
        yield _finding(
            facts,
            "error",
            "torch-sees-no-device",
            f"the driver ({driver[0].driver or 'version unknown'}) lists {len(driver)} NVIDIA device(s), but torch "
            f"{torch.version} sees none: training would run on the CPU",
            "python -c 'import torch; torch.cuda.init()'   (a +cpu build: install one for CUDA, see "
            "https://pytorch.org/get-started/locally; to use the CPU on purpose: export CUDA_VISIBLE_DEVICES=-1)",
        )
    elif len(torch.devices) < len(driver) and not torch.problem:
        shown = f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "torch"
        yield _finding(
            facts,
            "note",
            "device-hidden",
            f"{shown} shows {len(torch.devices)} of {len(driver)} devices",
            "unset CUDA_VISIBLE_DEVICES   (to train on all)",
        )


def _devices(facts: HostFacts) -> Iterator[Finding]:
    for device in facts.torch.devices:
        if device.capability and not is_compiled_for(device.capability, facts.torch.architectures):
            yield _finding(
                facts,
                "error",
                "device-too-old-for-torch",
                f"{device.name} ({device.uuid or f'cuda:{device.index}'}) has compute capability {device.capability}, "
                f"and torch {facts.torch.version} has no kernels for it ({', '.join(facts.torch.architectures)})",
                "pip install a torch that has them (https://pytorch.org/get-started/previous-versions), or leave the "
                "device out: export CUDA_VISIBLE_DEVICES=<UUIDs of the others>",
            )
    names = {device.name for device in facts.devices if device.kind == "cuda"}
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES", "")
    by_index = any(word.strip().isdigit() for word in visible.split(","))
    if len(names) > 1 and facts.environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and by_index:
        yield _finding(
            facts,
            "warning",
            "device-order",
            f"devices of {len(names)} kinds, and CUDA_VISIBLE_DEVICES={visible} counts them: CUDA counts the fastest "
            "first, nvidia-smi by slot, so this may hide another device than meant",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID   (or name devices by UUID in CUDA_VISIBLE_DEVICES)",
        )


def is_compiled_for(capability: str, architectures: tuple[str, ...]) -> bool:
    """Return whether kernels for `architectures` ("sm_86", "compute_90") run on `capability` ("8.6").

    Binary code runs on the same major version from its minor version on, PTX on everything newer (CUDA C++ Programming
    Guide, binary and PTX compatibility). "sm_90a" runs on 9.0 alone. Nothing known counts as yes.
    """
    try:
        major, minor = (int(part) for part in capability.split("."))
    except ValueError:
        return True
    if not architectures:
        return True
    for architecture in architectures:
        form, _, number = architecture.partition("_")
        special = number[-1:] in ("a", "f")
        digits = number[:-1] if special else number
        if not digits.isdigit():
            continue
        its_major, its_minor = int(digits[:-1] or "0"), int(digits[-1])
        if form == "sm" and its_major == major and (its_minor == minor if special else its_minor <= minor):
            return True
        if form == "compute" and not special and (its_major, its_minor) <= (major, minor):
            return True
    return False


def _limits(facts: HostFacts) -> Iterator[Finding]:
    quota, usable = facts.cpu_quota_cores, facts.cores_allowed or facts.cores
    if quota is not None and quota < usable:
        threads = max(1, int(quota))
        yield _finding(
            facts,
            "warning",
            "cpu-quota",
            f"the container or service may use {quota:g} cores' time of {usable} cores: threads for all of them are "
            "stopped in bursts, and steps jitter",
            f"export OMP_NUM_THREADS={threads}   (or start the container with more: docker run --cpus={usable})",
        )
    if 0 < facts.cores_allowed < facts.cores:
        yield _finding(
            facts,
            "note",
            "cpu-affinity",
            f"this process may run on {facts.cores_allowed} of {facts.cores} cores",
            "taskset -cp $$",
        )
    limit = facts.memory_limit_bytes
    if limit is not None and facts.memory_bytes and limit < facts.memory_bytes:
        yield _finding(
            facts,
            "note",
            "memory-limit",
            f"the container or service may use {format_bytes(limit)} of {format_bytes(facts.memory_bytes)} memory",
            "docker run --memory=...   (or MemoryMax= of the service) if training needs more",
        )
    if 0 < facts.open_files < _ENOUGH_OPEN_FILES:
        enough = 65536 if not facts.open_files_most else min(65536, facts.open_files_most)
        fix = f"ulimit -n {enough}"
        if 0 < facts.open_files_most < _ENOUGH_OPEN_FILES:
            fix = "raise `nofile` in /etc/security/limits.conf, or docker run --ulimit nofile=65536:65536"
        yield _finding(
            facts,
            "warning",
            "open-files",
            f"a process may have {facts.open_files} files open; ranks and loader workers run out at some dozen each",
            fix,
        )
    shared = facts.shared_memory_bytes
    if shared is not None and shared < _ENOUGH_SHARED_MEMORY_BYTES:
        yield _finding(
            facts,
            "warning",
            "shared-memory",
            f"/dev/shm holds {format_bytes(shared)}; loader workers die of a bus error once it is full",
            "docker run --shm-size=8g   (or mount -o remount,size=8g /dev/shm)",
        )


def _names(facts: HostFacts, several_hosts: bool) -> Iterator[Finding]:
    master = facts.environment.get("MASTER_ADDR", "")
    reachable = [
        address for each in facts.interfaces if each.up for address in each.addresses if leads_elsewhere(address)
    ]
    example = reachable[0] if reachable else "<address of this host>"
    if master and not facts.master_resolves_to:
        yield _finding(
            facts,
            "error",
            "master-unknown",
            f"MASTER_ADDR={master} is no host name or address that is known here",
            f"getent hosts {master}   (then export MASTER_ADDR=<address of rank 0's host>)",
        )
    if several_hosts and any(is_loopback(address) for address in facts.master_resolves_to[:1]):
        yield _finding(
            facts,
            "error",
            "master-loopback",
            f"MASTER_ADDR={master} is {facts.master_resolves_to[0]}, which no other host can reach",
            f"export MASTER_ADDR={example}   (on every host; an address of rank 0's host)",
        )
    if not any(is_loopback(address) for address in facts.resolves_to[:1]):
        return
    # With MASTER_ADDR in numbers nothing looks the name up; torchrun's default does.
    numbers = bool(master) and facts.master_resolves_to == (master,)
    severity = "note" if not several_hosts else "warning" if numbers else "error"
    yield _finding(
        facts,
        severity,
        "name-loopback",
        f"this host's own name is {facts.resolves_to[0]} here: a rank that gives its name to others cannot be "
        "reached by them",
        f"export MASTER_ADDR={example}   (torchrun: --master-addr or --rdzv-endpoint; or map the name to {example} in "
        "/etc/hosts)",
    )


def _interface_variables(facts: HostFacts, several_hosts: bool) -> Iterator[Finding]:
    usable = [each.name for each in facts.interfaces if each.up and any(map(leads_elsewhere, each.addresses))]
    for variable in INTERFACE_VARIABLES:
        value = facts.environment.get(variable)
        if value is None or not facts.interfaces:
            continue
        chosen = chosen_interfaces(variable, value, facts.interfaces)
        fix = f"export {variable}={usable[0]}   (or unset {variable})" if usable else f"unset {variable}"
        if not chosen:
            names = ", ".join(each.name for each in facts.interfaces)
            what = f"{variable}={value}, but this host has no such interface (it has {names})"
        elif not any(each.up and each.addresses for each in chosen):
            what = f"{variable}={value}, but {chosen[0].name} is {'down' if not chosen[0].up else 'without an address'}"
        elif several_hosts and not any(leads_elsewhere(address) for each in chosen for address in each.addresses):
            what = f"{variable}={value}, and from {chosen[0].name} no other host can be reached"
        else:
            continue
        yield _finding(facts, "error", "interface-variable", what, fix)


def _ports(facts: HostFacts) -> Iterator[Finding]:
    text = facts.environment.get("MASTER_PORT")
    if text is not None and not any(port.setting for port in facts.ports):
        what = f"MASTER_PORT={text} is no port (1 to 65535)"
        yield _finding(facts, "error", "port-wrong", what, "export MASTER_PORT=29500")
    for port in facts.ports:
        if not port.free:
            asked = f"{port.setting}={port.number}" if port.setting else f"port {port.number}, torchrun's default,"
            yield _finding(
                facts,
                "error" if port.setting else "warning",
                "port-busy",
                f"{asked} is taken{f' by {port.holder}' if port.holder else ''}: rank 0 could not listen there",
                f"ss -ltnp 'sport = :{port.number}'   (then end it, or export MASTER_PORT={port.number % 65535 + 1} on "
                "every host)",
            )


def _finding(facts: HostFacts, severity: str, code: str, what: str, todo: str) -> Finding:
    return Finding(severity=severity, code=code, where=facts.host, what=what, todo=todo)
