"""One question to the hub of another machine, asked before workers are started and while it does not answer them.

The one idea: a supervisor never trains, so it needs no connection of its own; it asks what a person would ask with a
browser, and tells apart a wrong token, a machine that is away, and a run that is over.
"""

import http.client
import os

import msgspec

from ragtag.core.errors import LaunchError
from ragtag.core.hub_address import hub_address
from ragtag.hub.connection import client_tls


class HubGone(LaunchError):
    """The machine answers, and says that nothing listens there."""


class HubUnreachable(LaunchError):
    """Nothing answers."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a generation."""

    name: str
    host: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What a hub says about its run."""

    run: str
    members: tuple[Member, ...] = ()
    """Of the last generation."""
    connected: tuple[str, ...] = ()
    end: str = ""
    """Why the run is over; empty: it is not."""


def ask(hub: str, token: str, *, timeout_s: float, trusted: str | None = None) -> Health:
    """Return what the hub at "host:port" says about its run.

    `trusted` is what $RAGTAG_TLS may hold, where that is not to be looked at.

    Raises:
        HubGone, HubUnreachable: there is none, or it cannot be reached.
        LaunchError: it does not know the token, or is no hub.
    """
    host, port = hub_address(hub)
    tls = client_tls(os.environ.get("RAGTAG_TLS", "") if trusted is None else trusted)
    if tls is None:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls)
    try:
        connection.request("GET", "/health", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        body = answer.read(1 << 22)
    except ConnectionRefusedError:
        raise HubGone(
            f"Nothing listens at {hub}. Does the run still go on there, and is the address the one that `ragtag "
            f"launch` printed on the first machine?"
        ) from None
    except OSError as error:
        raise HubUnreachable(
            f"{hub} does not answer ({error.strerror or error}). Is the machine up, and does a firewall let port "
            f"{port} through? `ragtag doctor --listen` there and `ragtag doctor {host}` here tell more."
        ) from None
    except http.client.HTTPException:
        raise LaunchError(f"What listens at {hub} is no hub of ragtag's.") from None
    finally:
        connection.close()
    if answer.status in (401, 403):
        raise LaunchError(
            f"The hub at {hub} does not know this token. Copy the whole line that `ragtag launch` printed on the first "
            f"machine."
        )
    try:
        return msgspec.json.decode(body, type=Health)
    except msgspec.DecodeError:
        raise LaunchError(f"What listens at {hub} is no hub of ragtag's (HTTP status {answer.status}).") from None
