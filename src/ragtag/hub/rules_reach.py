"""Whether the members of a run could connect to each other, as far as the addresses that they listen on tell.

The one idea: an address inside a machine is reached from that machine only, so who listens there can train with its own
machine's workers and with nobody else's; better said at the door than found out by generations that do not form.
"""

from ragtag.core.hub_address import is_loopback
from ragtag.hub.frames import Member
from ragtag.hub.rules_state import HubState


def unreachable(state: HubState, comer: Member) -> str:
    """Return why `comer` and those who are here could not reach each other; empty: nothing speaks against it."""
    here = [worker.member for worker in state.workers if not worker.left and worker.inc != comer.inc]
    elsewhere = [member for member in here if _machine(member) != _machine(comer)]
    if is_loopback(comer.address) and elsewhere:
        return (
            f"it listens on {comer.address}, an address inside {comer.host}, which {_hosts(elsewhere)} cannot reach. "
            f"Start the run with --address and an address that all machines reach, without a tunnel, and type the line "
            f"that it prints"
        )
    hidden = [member for member in elsewhere if is_loopback(member.address)]
    if hidden:
        return (
            f"the workers on {_hosts(hidden)} listen on {hidden[0].address}, an address inside that machine, which "
            f"{comer.host} cannot reach. Start the run there with --address and one of that machine's addresses "
            f"(`ip -brief address` lists them), and type the line that it prints"
        )
    return ""


def _machine(member: Member) -> tuple[str, str]:
    return member.host, member.boot_id


def _hosts(members: list[Member]) -> str:
    return ", ".join(sorted({member.host for member in members})[:4])
