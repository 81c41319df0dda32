"""Edits of a cluster, as people ask: "+1 rtx3090", "-laptop", "link home=1Gbit/s".

The one idea: an edit makes another cluster and another profile, and planning knows nothing of questions. What was
measured about something that the edit changes no longer counts.
"""

import re

import msgspec

from ragtag.core.cluster import Cluster, Device, Link
from ragtag.core.errors import SettingError, did_you_mean
from ragtag.core.profile import Profile
from ragtag.core.quantities import parse_bandwidth

_FORMS = 'Write "+1 NAME", "+2 NAME@HOST", "-NAME", "link HOST=1Gbit/s" or "link HOST-HOST=1Gbit/s".'
_ADD = re.compile(r"\+\s*(\d+)?\s*([^\s@]+)(?:@(\S+))?")
_REMOVE = re.compile(r"-\s*(\S+)")
_LINK = re.compile(r"link\s+([^=]+?)\s*=\s*(.+)")


def apply_edit(edit: str, cluster: Cluster, profile: Profile) -> tuple[Cluster, Profile]:
    """Return cluster and profile after `edit`.

    A device that is added is like one of that name or kind, on its host or on the one that is named. A link of one host
    changes all links of that host.

    Raises:
        SettingError: it is no edit, or names a device, kind, host or unit that there is not.
    """
    text = edit.strip()
    if (match := _LINK.fullmatch(text)) is not None:
        return _change_link(match[1], match[2], cluster, profile)
    if (match := _ADD.fullmatch(text)) is not None:
        return _add(int(match[1] or 1), match[2], match[3], cluster, profile)
    if (match := _REMOVE.fullmatch(text)) is not None:
        return _remove(match[1], cluster), profile
    raise SettingError(f"--what-if '{edit}' is not an edit of a cluster. {_FORMS}")


def _add(number: int, name: str, host: str | None, cluster: Cluster, profile: Profile) -> tuple[Cluster, Profile]:
    if number < 1:
        raise SettingError(f"--what-if '+{number} {name}' adds nothing. {_FORMS}")
    devices = cluster.expanded()
    like = next((device for device in devices if device.name == name), None) or next(
        (device for device in (*cluster.devices, *devices) if name in (device.name, device.kind)), None
    )
    measured = next((device for device in profile.devices if name in (device.name, device.kind)), None)
    if like is None and measured is None:
        known = {device.name for device in (*cluster.devices, *profile.devices)}
        known |= {device.kind for device in (*cluster.devices, *profile.devices)}
        raise SettingError(
            f"--what-if '+{number} {name}': nothing of that name or kind is known.{did_you_mean(name, known)} "
            f"Known are {', '.join(sorted(known))}. Measure one and give its file: --profile other.json."
        )
    if like is None:
        assert measured is not None
        like = Device(name=measured.name, kind=measured.kind, host=host or devices[0].host)
    place = host or like.host
    # A host that is new has the links of the device's own host: the same room, most likely.
    hosts = {device.host for device in devices}
    links = cluster.links if place in hosts else (*cluster.links, *_links_like(like.host, place, cluster))
    measured_as = measured or next(device for device in profile.devices if device.name in (like.name, f"{like.name}-0"))
    taken = {device.name for device in devices}
    names = _new_names(name, number, taken)
    added = tuple(
        msgspec.structs.replace(like, name=new, host=place, count=1, drift=(), flip=None, stall=()) for new in names
    )
    profiled = tuple(msgspec.structs.replace(measured_as, name=new, uuid="") for new in names)
    return (
        msgspec.structs.replace(cluster, devices=(*devices, *added), links=links),
        msgspec.structs.replace(profile, devices=(*profile.devices, *profiled)),
    )


def _new_names(name: str, number: int, taken: set[str]) -> list[str]:
    names: list[str] = []
    index = 1
    while len(names) < number:
        if (new := f"{name}+{index}") not in taken:
            names.append(new)
        index += 1
    return names


def _links_like(host: str, place: str, cluster: Cluster) -> list[Link]:
    return [
        msgspec.structs.replace(link, between=(place, link.between[link.between[0] == host]))
        for link in cluster.links
        if host in link.between
    ]


def _remove(name: str, cluster: Cluster) -> Cluster:
    devices = cluster.expanded()
    entry = next((device for device in cluster.devices if device.name == name), None)
    gone = {single.name for single in Cluster(devices=(entry,)).expanded()} if entry is not None else {name}
    if name in {device.host for device in devices} and name not in {device.name for device in devices} and not entry:
        gone = {device.name for device in devices if device.host == name}
    left = tuple(device for device in devices if device.name not in gone)
    if len(left) == len(devices):
        known = {device.name for device in (*cluster.devices, *devices)} | {device.host for device in devices}
        raise SettingError(
            f"--what-if '-{name}': there is no device or host '{name}'.{did_you_mean(name, known)} "
            f"Devices are {', '.join(device.name for device in devices[:20])}."
        )
    if not left:
        raise SettingError(f"--what-if '-{name}' leaves no device. Keep at least one.")
    hosts = {device.host for device in left}
    links = tuple(link for link in cluster.links if set(link.between) <= hosts)
    return msgspec.structs.replace(cluster, devices=left, links=links)


def _change_link(where: str, amount: str, cluster: Cluster, profile: Profile) -> tuple[Cluster, Profile]:
    bandwidth = parse_bandwidth(amount)
    if bandwidth == 0:
        raise SettingError(f"--what-if 'link {where}={amount}': a link needs more than nothing, like 1Gbit/s.")
    hosts = list(dict.fromkeys(device.host for device in cluster.expanded()))
    pairs = _pairs(where, hosts)
    known = {frozenset(link.between): link for link in cluster.links}
    for pair in pairs:
        first, second = sorted(pair)
        known[pair] = msgspec.structs.replace(
            known.get(pair) or Link(between=(first, second)), bandwidth_bytes_per_s=bandwidth
        )
    measured = tuple(
        msgspec.structs.replace(link, bandwidth_bytes_per_s=bandwidth) if frozenset(link.between) in pairs else link
        for link in profile.links
    )
    return (
        msgspec.structs.replace(cluster, links=tuple(known.values())),
        msgspec.structs.replace(profile, links=measured),
    )


def _pairs(where: str, hosts: list[str]) -> set[frozenset[str]]:
    if where in hosts:
        pairs = {frozenset((where, other)) for other in hosts if other != where}
    else:
        pairs = {
            frozenset((first, second))
            for first in hosts
            for second in hosts
            if first != second and where in (f"{first}-{second}", f"{first}:{second}")
        }
    if not pairs:
        raise SettingError(
            f"--what-if 'link {where}=...': there is no link of '{where}'.{did_you_mean(where, hosts)} Hosts are "
            f"{', '.join(hosts[:20])}. {_FORMS}"
        )
    return pairs
