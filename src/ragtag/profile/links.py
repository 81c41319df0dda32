"""All links of a run, measured between its ranks.

The one idea: one pair of ranks after the other, so that they do not disturb each other.
"""

from collections.abc import Callable, Sequence

import msgspec

from ragtag.comm.group import Group
from ragtag.comm.transport import Transport
from ragtag.core.profile import LinkProfile
from ragtag.profile.link import measure_link, pairs_to_measure
from ragtag.profile.ping import Asker, answer

_LINKS_S = 12.0
"""For all links together; each gets its part, within limits."""


def links_between(
    group: Group, hosts: Sequence[str], say: Callable[[str], None] = lambda text: None
) -> tuple[LinkProfile, ...]:
    """Measure the links between all hosts that ranks are on, and within each; a call of the group.

    Args:
        hosts: by rank.
        say: told what is under way.
    """
    pairs = pairs_to_measure(hosts)
    budget_s = min(4.0, max(0.5, _LINKS_S / max(1, len(pairs))))
    mine: list[LinkProfile] = []
    for asker, answerer in pairs:
        between = (hosts[asker], hosts[answerer])
        say(f"link {between[0]} - {between[1]}" if between[0] != between[1] else f"link within {between[0]}")

        def job(transport: Transport, asker: int = asker, answerer: int = answerer) -> LinkProfile | None:
            if group.rank == answerer:
                answer(transport, asker)
            if group.rank != asker:
                return None
            end = Asker(transport, answerer)
            link = measure_link(end.round_trip, between=(hosts[asker], hosts[answerer]), budget_s=budget_s)
            end.close()
            return link

        work = group.on_transport(job)
        group.wait(work, f"measuring the link between {between[0]} and {between[1]}")
        if work.result is not None:
            mine.append(work.result)
        group.barrier("measuring links")
    gathered = group.gather("links", [msgspec.to_builtins(link) for link in mine])
    return tuple(msgspec.convert(link, LinkProfile) for several in gathered for link in several)
