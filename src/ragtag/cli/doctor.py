"""`ragtag doctor`: what is here, whether the hosts can talk, and what to type where something is wrong.

The one idea: the same command plays both parts. With --listen it answers other doctors; given hosts it examines them
and lets them examine each other. What it means is decided by the pure rules in `ragtag.doctor`.
"""

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
from rich.console import Console

from ragtag.cli.doctor_table import described, show
from ragtag.core.errors import SettingError
from ragtag.doctor.diagnose import diagnose
from ragtag.doctor.examine import examine
from ragtag.doctor.facts import Diagnosis, Finding, HostFacts, Torch, Way
from ragtag.doctor.host import TORCH_TIMEOUT_S, holder_of, host_facts
from ragtag.doctor.interfaces import leads_elsewhere
from ragtag.doctor.listener import MOST_TARGETS, Listener, bind
from ragtag.doctor.rules_pair import unreachable

DEFAULT_PORT = 29470
_LOOK_TIMEOUT_S = TORCH_TIMEOUT_S + 15


def run_doctor(
    *,
    hosts: Sequence[str] = (),
    listen: bool = False,
    bind_address: str | None = None,
    port: int | None = None,
    token: str | None = None,
    wait_s: float | None = None,
    as_json: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Examine, print, and return the exit status: 0; 1 if a finding stops training.

    Raises:
        SettingError: the words contradict each other, or an address is none.
    """
    addresses = [parse_host(text) for text in hosts]
    doubled = [text for index, text in enumerate(hosts) if addresses[index] in addresses[:index]]
    if doubled:
        raise SettingError(f"{doubled[0]} is named twice; name each host once.")
    if len(addresses) > MOST_TARGETS:
        raise SettingError(f"{len(addresses)} hosts; at most {MOST_TARGETS} at once. Examine them in groups.")
    if token is not None and not token.strip():
        raise SettingError("--token is empty; leave it out and `ragtag doctor --listen` makes one up.")
    if listen:
        if hosts:
            raise SettingError("--listen takes no hosts: run it there, and `ragtag doctor HOST:PORT ...` on one other.")
        return _listen(
            bind_address or "",
            DEFAULT_PORT if port is None else port,
            token,
            600.0 if wait_s is None else wait_s,
            as_json,
            environ,
        )
    misplaced = {"--bind": bind_address, "--port": port, "--wait-s": wait_s}
    for name, value in misplaced.items():
        if value is not None:
            raise SettingError(f"{name} belongs to --listen; to examine another host: ragtag doctor HOST:PORT")
    if not addresses:
        with _status(Console(stderr=True), "looking at this host (importing torch)"):
            facts = host_facts(environ)
        return _finish(diagnose([facts]), as_json)
    if token is None:
        raise SettingError(
            f"--token is missing: run `ragtag doctor --listen` on {hosts[0]} and type the line that it prints "
            "(or set RAGTAG_TOKEN)."
        )
    return _examine_all(addresses, token, as_json, environ)


def parse_host(text: str) -> tuple[str, int]:
    """Return (host, port) of "host", "host:port", "[IPv6]:port" or an IPv6 address in numbers.

    Raises:
        SettingError: it is none of these.
    """
    host, port = text, str(DEFAULT_PORT)
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise SettingError(f"{text!r} is no HOST:PORT; an IPv6 address with a port is written [fd00::1]:{port}.")
        port = rest[1:] if rest else port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or any(letter.isspace() or letter == "/" for letter in host):
        raise SettingError(f"{text!r} is no HOST:PORT, like desktop:{DEFAULT_PORT} or 192.168.1.20:{DEFAULT_PORT}.")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise SettingError(f"{text!r}: the port must be a whole number from 1 to 65535, like {host}:{DEFAULT_PORT}.")
    return host, int(port)


def _examine_all(addresses: Sequence[tuple[str, int]], token: str, as_json: bool, environ: Mapping[str, str]) -> int:
    begin_s = time.monotonic()
    console = Console(stderr=True)
    own_host = socket.gethostname()
    looked: list[HostFacts] = []
    looking = threading.Thread(target=lambda: looked.append(host_facts(environ)), name="ragtag-doctor", daemon=True)
    looking.start()

    def found(way: Way) -> None:
        # At once: the tables may have to wait for torch.
        if not way.ok and not as_json:
            console.print(described(unreachable(way)), soft_wrap=True)

    with _status(console, f"calling {len(addresses)} host(s), and letting them call each other"):
        examination = examine(own_host, addresses, token, found=found)
    with _status(console, "looking at this host (importing torch)"):
        looking.join(_LOOK_TIMEOUT_S)
    own = looked[0] if looked else HostFacts(host=own_host, torch=Torch(problem="this host could not be looked at"))
    diagnosis = diagnose(
        [own, *examination.hosts], examination.ways, examination.clocks, elapsed_s=time.monotonic() - begin_s
    )
    return _finish(diagnosis, as_json)


def _listen(
    bind_address: str, port: int, token: str | None, wait_s: float, as_json: bool, environ: Mapping[str, str]
) -> int:
    if not 0 <= port < 65536:
        raise SettingError(f"--port must be a whole number from 0 (any) to 65535, got {port}.")
    if not wait_s > 0:
        raise SettingError(f"--wait-s must be more than 0 seconds, got {wait_s:g}.")
    own_host = socket.gethostname()
    console = Console(stderr=True)
    listener = None
    try:
        # Before this host is looked at, so that a busy port is known at once; callers come only when it listens.
        bound = bind(bind_address, port)
        with _status(console, "looking at this host (importing torch)"):
            facts = host_facts(environ)
        made_up = token is None
        token = token or secrets.token_urlsafe(12)
        listener = Listener(bound, token=token, facts=facts, host=own_host, event=lambda text: _say(console, text))
    except OSError as error:
        return _finish(_cannot_listen(own_host, bind_address, port, error), as_json)
    diagnosis = diagnose([facts])
    _finish(diagnosis, as_json)
    shown = token if made_up else "..."
    _say(console, f"{own_host} listens at port {listener.port}. On the other host, type one of:")
    for address in _addresses(facts, bind_address):
        typed = f"[{address}]" if ":" in address else address
        _say(console, f"  ragtag doctor {typed}:{listener.port} --token {shown}")
    _say(console, f"Ends with Ctrl-C, or when nobody calls for {wait_s:g} s.")
    try:
        while (left_s := listener.last_heard_s + wait_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 1.0))
    except KeyboardInterrupt:
        return 0 if diagnosis.ok else 1
    finally:
        listener.close()
    if listener.num_callers:
        return 0 if diagnosis.ok else 1
    _say(
        console,
        f"Nobody called within {wait_s:g} s. Was the command above typed on the other host, and does a firewall here "
        f"let port {listener.port} through? sudo ufw allow {listener.port}/tcp",
    )
    return 1


def _cannot_listen(host: str, address: str, port: int, error: OSError) -> Diagnosis:
    holder = holder_of(port)
    if error.errno == errno.EADDRNOTAVAIL:
        what, todo = f"{address} is no address of this host", "ip -brief address   (or leave --bind out)"
    else:
        what = f"cannot listen at port {port}: {error.strerror}" + (f"; {holder} has it" if holder else "")
        todo = f"ragtag doctor --listen --port {port % 65535 + 1}   (`ss -ltnp 'sport = :{port}'` shows who has it)"
    finding = Finding(severity="error", code="doctor-port", where=host, what=what, todo=todo)
    return Diagnosis(ok=False, findings=(finding,), hosts=())


def _addresses(facts: HostFacts, bind_address: str) -> list[str]:
    """What others may type, without those that only this host reaches, if it has any other."""
    if bind_address:
        return [bind_address]
    found = [address for each in facts.interfaces if each.up for address in each.addresses if leads_elsewhere(address)]
    return found or ["127.0.0.1"]


def _finish(diagnosis: Diagnosis, as_json: bool) -> int:
    if as_json:
        print(msgspec.json.encode(diagnosis).decode(), flush=True)
    else:
        show(diagnosis, Console())
    return 0 if diagnosis.ok else 1


def _status(console: Console, text: str) -> AbstractContextManager[object]:
    if console.is_terminal:
        return console.status(text)
    _say(console, text)
    return nullcontext()


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
