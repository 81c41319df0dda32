"""Puts the findings of all rules in order and says whether training can go on.

The one idea: one pure function from everything that was found out to one value that is printed, written as JSON, and
decides the exit status.
"""

from collections.abc import Sequence

from ragtag.doctor.facts import ClockOffset, Diagnosis, HostFacts, Way
from ragtag.doctor.rules_host import host_findings
from ragtag.doctor.rules_pair import pair_findings

SEVERITIES = ("error", "warning", "note")


def diagnose(
    hosts: Sequence[HostFacts],
    ways: Sequence[Way] = (),
    clocks: Sequence[ClockOffset] = (),
    *,
    elapsed_s: float = 0.0,
) -> Diagnosis:
    """Return the diagnosis of `hosts`, the examining one first; `ways` may name hosts that could not be reached."""
    several = len(hosts) > 1 or bool(ways)
    # Who cannot talk comes first: it is what was asked, and often why the rest looks odd.
    found = list(pair_findings(hosts, ways, clocks))
    found += (finding for facts in hosts for finding in host_findings(facts, several_hosts=several))
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Diagnosis(
        ok=all(finding.severity != "error" for finding in found),
        findings=tuple(found),
        hosts=tuple(hosts),
        ways=tuple(ways),
        clocks=tuple(clocks),
        elapsed_s=elapsed_s,
    )
