"""Whose links are slow, told from how long messages were under way on each link of the ring.

The one idea: a link belongs to two ranks, so one slow link blames nobody. The machine is named all of whose links are
slow, and where there are only two, the one at the far end from rank 0.
"""

from collections.abc import Collection, Sequence

from ragtag.control.blame_excess import Excess, lower_median, of_others

_SURELY = 4
"""Steps after which a machine's other link would be known to be slow too."""


class RingLinks:
    """The links of a ring of ranks on `hosts`; link r leads from rank r - 1 to rank r.

    Ranks on one host are one machine, unless all are on the same.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        count = len(hosts)
        places = list(hosts) if len(set(hosts)) > 1 else [str(rank) for rank in range(count)]
        self._ends = [(places[rank - 1], places[rank]) for rank in range(count)]
        pairs = [frozenset(ends) for ends in self._ends]
        self._like = [
            [
                other
                for other in range(count)
                if pairs[other] != pairs[link] and (len(pairs[other]) == 1) == (len(pairs[link]) == 1)
            ]
            for link in range(count)
        ]
        """By link, those that should be as fast."""
        self._all_alike = all(len(like) == count - 1 for like in self._like)
        self._borders = {
            place: tuple(link for link, ends in enumerate(self._ends) if (ends[0] == place) != (ends[1] == place))
            for place in dict.fromkeys(places)
        }
        self._places = places

    def expected_s(self, link_s: Sequence[float], usual: Sequence[float | None]) -> list[float]:
        """Return by link what is expected of it: as little as of others like it, or as it used to be; 0 where there is
        neither."""
        if self._all_alike:
            others = of_others(link_s)
        else:
            others = [lower_median([link_s[link] for link in like]) for like in self._like]
        known = [[each for each in both if each is not None] for both in zip(others, usual)]
        return [min(each, default=0.0) for each in known]

    def slow(self, found: Collection[int], links: Sequence[Excess]) -> dict[int, tuple[int, ...]]:
        """Return the rank, if any, to whom links are slow that were `found` to be, and which."""
        if not found or (len(found) == len(links) > 2):
            return {}  # what all links have in common is no rank's
        slow = [place for place, border in self._borders.items() if border and set(border).issubset(found)]
        if slow:
            if len(self._borders) == 2:
                place = next(each for each in self._borders if each != self._places[0])
            else:
                place = max(slow, key=lambda each: min([links[link].beyond.lately for link in self._borders[each]]))
            border = self._borders[place]
            return {next(link for link in border if self._places[link] == place): border}
        single = [link for link in found if links[link].beyond.run >= _SURELY and self._is_alone(link, links)]
        if not single:
            return {}
        link = max(single, key=lambda each: links[each].beyond.lately)
        to_near = self._places[link] == self._places[0]
        return {(link - 1) % len(links) if to_near else link: (link,)}

    def _is_alone(self, link: int, links: Sequence[Excess]) -> bool:
        """Whether no other link of its two machines could turn out to be slow as well."""
        ends = set(self._ends[link])
        beside = [other for other, places in enumerate(self._ends) if other != link and ends.intersection(places)]
        return all(max(list(links[other].beyond.newest)[-_SURELY:], default=0.0) < 1.0 for other in beside)

    def name(self, links: Sequence[int]) -> str:
        """Return "the link desk-home" where it is one between two hosts, "its links" otherwise."""
        pairs = {tuple(sorted((self._hosts[link - 1], self._hosts[link]))) for link in links}
        if len(pairs) == 1 and len(pair := next(iter(pairs))) == 2 and pair[0] != pair[1]:
            return f"the link {pair[0]}-{pair[1]}"
        return "its links"
