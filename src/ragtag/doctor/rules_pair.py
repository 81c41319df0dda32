"""Findings between hosts: who cannot reach whom and where the way ends, versions, clocks, address families, devices.

The one idea: a pure function of what was found on both ends; a pair that cannot talk is named with source, interface,
address and port, and the stage where it failed decides what to type.
"""

from collections.abc import Iterator, Sequence

from ragtag.doctor.facts import ClockOffset, Finding, HostFacts, Way
from ragtag.doctor.interfaces import is_loopback, leads_elsewhere, plain
from ragtag.doctor.rules_host import INTERFACE_VARIABLES, chosen_interfaces

_CLOCK_LIMIT_S = 2.0
_TUNNELS = ("tun", "tap", "wg", "tailscale", "zt", "docker", "br-", "virbr", "ppp")


def pair_findings(
    hosts: Sequence[HostFacts], ways: Sequence[Way], clocks: Sequence[ClockOffset]
) -> tuple[Finding, ...]:
    """Return what is wrong between `hosts`, the examining one first."""
    found = (
        *(unreachable(way) for way in ways if not way.ok),
        *_families(hosts),
        *_versions(hosts),
        *_clocks(clocks),
        *_addresses(hosts, ways),
        *_routes(hosts, ways),
        *_mtu(hosts, ways),
        *_devices(hosts),
    )
    return tuple(dict.fromkeys(found))


def unreachable(way: Way) -> Finding:
    """Return the finding that names a way that is not `ok`, and what to type for the stage where it ended."""
    place = f"{way.address} port {way.port}"
    through = f"interface {way.interface} ({way.source_address})" if way.interface else "no interface that leads there"
    what = f"cannot reach {place} through {through}: "
    listen = f"ragtag doctor --listen --port {way.port} --token ..."
    code = "unreachable"
    if way.stage == "resolve":
        what = f"{way.address} (port {way.port}) is no host name that {way.source} knows: "
        what += way.error
        code, todo = "name-unknown", f"getent hosts {way.address}   (on {way.source}; or type the address in numbers)"
    elif way.stage == "connect" and not way.interface:
        what += way.error
        family = "-6 " if ":" in way.address else ""
        todo = f"ip {family}route get {way.address}; ip -brief address   (on {way.source})"
    elif way.stage == "connect" and way.refused and way.control:
        what += "nothing listens there"
        todo = f"{listen}   (on {way.target})"
    elif way.stage == "connect":
        what += way.error
        source = way.source_address or f"<address of {way.source}>"
        if way.control:
            todo = (
                f"nc -vz {way.address} {way.port}   (on {way.source}; is {way.target} on and its address right? does "
                f"its firewall let {way.source} in: sudo ufw allow from {source}, on {way.target})"
            )
        else:
            todo = (
                f"sudo ufw allow from {source}   (on {way.target}: ranks listen at ports that the system chooses, so "
                f"its firewall must let {way.source} in at all; then ip route get {way.address}, on {way.source})"
            )
    elif way.stage == "token":
        what += way.error
        code, todo = "token", f"ragtag doctor --token ...   (the one that --listen printed on {way.target})"
    elif way.stage == "bulk":
        what += "small packets pass, large ones do not"
        code, todo = "large-packets", f"ping -M do -s 1472 {way.address}   (on {way.source}; then equal MTUs: ip link)"
    elif way.stage == "report":
        what = f"{way.source} did not report whether it reaches {place}: {way.error}"
        todo = f"{listen}   (again, on {way.source})"
    else:
        what += f"something listens, but it is no ragtag doctor that answers: {way.error}"
        todo = f"ss -ltnp 'sport = :{way.port}'   (on {way.target}; then {listen})"
    return Finding(severity="error", code=code, where=f"{way.source} -> {way.target}", what=what, todo=todo)


def _families(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for index, one in enumerate(hosts):
        for other in hosts[index + 1 :]:
            families = _families_of(one), _families_of(other)
            if all(families) and not families[0] & families[1]:
                yield _between(
                    one,
                    other,
                    "error",
                    "no-common-family",
                    f"{one.host} has {_join(families[0])} only, {other.host} {_join(families[1])} only",
                    f"ip -brief address   (on both; give {other.host} an address of {_join(families[0])})",
                )


def _families_of(facts: HostFacts) -> set[str]:
    addresses = [address for each in facts.interfaces if each.up for address in each.addresses]
    return {"IPv6" if ":" in address else "IPv4" for address in addresses if leads_elsewhere(address)}


def _versions(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    first = hosts[0]
    for other in hosts[1:]:
        if first.ragtag != other.ragtag:
            yield _mismatch(first, other, "error", "ragtag", first.ragtag, other.ragtag, "pip install ragtag==")
        torches = first.torch.version, other.torch.version
        if all(torches) and torches[0] != torches[1]:
            numbers = [version.partition("+")[0] for version in torches]
            minors = [number.split(".")[:2] for number in numbers]
            if minors[0] != minors[1]:
                yield _mismatch(first, other, "error", "torch", *torches, "pip install torch==")
            elif numbers[0] != numbers[1]:
                yield _mismatch(first, other, "warning", "torch", *torches, "pip install torch==")
            else:
                what = f"{first.host} has torch {torches[0]}, {other.host} {torches[1]}: builds for other devices"
                yield _between(first, other, "note", "torch-build", what, "nothing: they train together")
        if first.python and other.python and first.python.split(".")[:2] != other.python.split(".")[:2]:
            yield _mismatch(first, other, "warning", "python", first.python, other.python, "uv venv --python ")


def _mismatch(
    first: HostFacts, other: HostFacts, severity: str, name: str, one: str, two: str, install: str
) -> Finding:
    what = f"{name} differs: {one or 'unknown'} on {first.host}, {two or 'unknown'} on {other.host}"
    wanted = one.partition("+")[0] if one else "<version>"
    return _between(first, other, severity, f"{name}-version", what, f"{install}{wanted}   (on {other.host})")


def _clocks(clocks: Sequence[ClockOffset]) -> Iterator[Finding]:
    for clock in clocks:
        if abs(clock.offset_s) - clock.uncertainty_s > _CLOCK_LIMIT_S:
            side = "ahead of" if clock.offset_s > 0 else "behind"
            yield Finding(
                severity="warning",
                code="clock",
                where=clock.host,
                what=f"its clock is {abs(clock.offset_s):.1f} s {side} this host's: their logs will not line up",
                todo=f"sudo timedatectl set-ntp true   (on {clock.host}; `timedatectl` on both shows who is wrong)",
            )


def _addresses(hosts: Sequence[HostFacts], ways: Sequence[Way]) -> Iterator[Finding]:
    by_name = {facts.host: facts for facts in hosts}
    for way in ways:
        if way.stage == "resolve":
            continue
        if is_loopback(way.address):
            if way.control:
                what = f"{way.target} was called at {way.address}, which is {way.source} itself"
                todo = "ragtag doctor <address that other hosts reach>:PORT   (`ip -brief address` lists them)"
                yield Finding(severity="warning", code="target-loopback", where=way.target, what=what, todo=todo)
            continue
        target = by_name.get(way.target)
        if way.ok and way.control and target is not None and target.interfaces:
            own = [plain(address) for each in target.interfaces for address in each.addresses]
            if plain(way.address) not in own:
                yield Finding(
                    severity="warning",
                    code="translated-address",
                    where=f"{way.source} -> {way.target}",
                    what=f"{way.target} answers at {way.address}, but no interface of it has that address: a router or "
                    "a container forwards one port, while ranks listen at ports of their own",
                    todo="docker run --network=host   (or put the hosts in one network or VPN)",
                )


def _routes(hosts: Sequence[HostFacts], ways: Sequence[Way]) -> Iterator[Finding]:
    by_name = {facts.host: facts for facts in hosts}
    for way in ways:
        source = by_name.get(way.source)
        if not way.interface or is_loopback(way.address) or source is None:
            continue
        place = f"{way.source} -> {way.target}"
        for variable in INTERFACE_VARIABLES:
            value = source.environment.get(variable)
            chosen = chosen_interfaces(variable, value, source.interfaces) if value else ()
            if chosen and way.interface not in [each.name for each in chosen]:
                yield Finding(
                    severity="warning",
                    code="interface-differs",
                    where=place,
                    what=f"the way to {way.target} ({way.address}) leaves {way.source} through {way.interface}, but "
                    f"{variable}={value}",
                    todo=f"export {variable}={way.interface}   (on {way.source})",
                )
        if way.interface.startswith(_TUNNELS):
            what = f"the way from {way.source} to {way.target} goes through {way.interface}, a tunnel or virtual bridge"
            todo = f"ip route get {way.address}   (on {way.source}; is there a direct address?)"
            yield Finding(severity="note", code="tunnel", where=place, what=what, todo=todo)
        elif way.interface.startswith("wl"):
            what = f"the way from {way.source} to {way.target} goes through {way.interface}: Wi-Fi, slow and unsteady"
            todo = "plug in a cable   (ragtag profile measures what the link gives)"
            yield Finding(severity="note", code="wireless", where=place, what=what, todo=todo)


def _mtu(hosts: Sequence[HostFacts], ways: Sequence[Way]) -> Iterator[Finding]:
    sizes = {(facts.host, each.name): each.mtu for facts in hosts for each in facts.interfaces}
    used = {(way.source, way.target): way.interface for way in ways if way.interface and not is_loopback(way.address)}
    for (source, target), interface in used.items():
        back = used.get((target, source))
        if source < target and back:
            one, other = sizes.get((source, interface), 0), sizes.get((target, back), 0)
            if one and other and one != other:
                larger, name = (source, interface) if one > other else (target, back)
                yield Finding(
                    severity="warning",
                    code="mtu",
                    where=f"{source} <-> {target}",
                    what=f"MTU is {one} on {source}'s {interface} and {other} on {target}'s {back}: large packets may "
                    "get lost where small ones pass",
                    todo=f"sudo ip link set {name} mtu {min(one, other)}   (on {larger})",
                )


def _devices(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    counts = {facts.host: len(facts.torch.devices) or 1 for facts in hosts if facts.torch.version}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{host} {count}" for host, count in counts.items())
        yield Finding(
            severity="note",
            code="unequal-devices",
            where=", ".join(counts),
            what=f"unequal numbers of devices: {listed}; ragtag trains on all of them",
            todo="torchrun --nproc-per-node=<that host's number>   (on each host its own number, not the largest)",
        )
    able = {facts.host: [set(device.dtypes) for device in facts.torch.devices or facts.devices] for facts in hosts}
    without = [host for host, devices in able.items() if any("bf16" not in dtypes for dtypes in devices)]
    if without and len(without) < len([host for host, devices in able.items() if devices]):
        yield Finding(
            severity="note",
            code="dtypes-differ",
            where=", ".join(without),
            what=f"bf16 is not in the hardware of {', '.join(without)}, but of the others",
            todo='precision="fp32"   (or leave bf16 on and let ragtag profile say what it costs there)',
        )


def _between(one: HostFacts, other: HostFacts, severity: str, code: str, what: str, todo: str) -> Finding:
    return Finding(severity=severity, code=code, where=f"{one.host} <-> {other.host}", what=what, todo=todo)


def _join(names: set[str]) -> str:
    return " and ".join(sorted(names))
