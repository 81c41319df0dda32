"""This host's interfaces and the way out of it to an address.

The one idea: the kernel is asked which of its addresses it would use, by connecting a UDP socket, which sends nothing.
"""

import ipaddress
import socket
from collections.abc import Sequence

import psutil

from ragtag.doctor.facts import Interface


def interfaces() -> tuple[Interface, ...]:
    """Return this host's interfaces that have an address or are up, by name."""
    states = psutil.net_if_stats()
    found = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        state = states.get(name)
        addresses = tuple(
            plain(entry.address) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
        up = bool(state and state.isup)
        if addresses or up:
            found.append(Interface(name=name, addresses=addresses, up=up, mtu=state.mtu if state else 0))
    return tuple(found)


def way_out(address: str, known: Sequence[Interface]) -> tuple[str, str]:
    """Return (interface, source address) that lead to `address`, which is numbers; two empty strings: no route."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source = plain(str(probe.getsockname()[0]))
    except OSError:
        return "", ""
    return interface_of(source, known), source


def interface_of(address: str, known: Sequence[Interface]) -> str:
    """Return the name of the interface that has `address`; empty: none has."""
    return next((each.name for each in known if plain(address) in each.addresses), "")


def plain(address: str) -> str:
    """Return `address` without a zone, and an IPv4 address that is dressed as IPv6 as IPv4."""
    bare = address.partition("%")[0]
    try:
        parsed = ipaddress.ip_address(bare)
    except ValueError:
        return bare
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(parsed)


def is_loopback(address: str) -> bool:
    """Return whether `address` is numbers that only this host reaches."""
    try:
        return ipaddress.ip_address(plain(address)).is_loopback
    except ValueError:
        return False


def leads_elsewhere(address: str) -> bool:
    """Return whether another host may reach `address`: neither loopback nor link-local, which needs a zone."""
    try:
        parsed = ipaddress.ip_address(plain(address))
    except ValueError:
        return True
    return not parsed.is_loopback and not (isinstance(parsed, ipaddress.IPv6Address) and parsed.is_link_local)


def resolve(name: str, port: int) -> tuple[str, ...]:
    """Return the addresses of `name`, IPv4 first, as training prefers them; OSError if it has none.

    Asks the name server, so call it through `bounded.within`.
    """
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return tuple(dict.fromkeys(plain(str(entry[4][0])) for entry in ordered))
