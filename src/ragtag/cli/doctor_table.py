"""The doctor's diagnosis as tables for a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragtag.core.quantities import format_bytes
from ragtag.doctor.facts import Diagnosis, Finding, HostFacts, Way

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print devices, hosts, who reaches whom, then findings with what to type, then one line of judgement."""
    console.print(_devices(diagnosis))
    console.print(_hosts(diagnosis))
    console.print(_interfaces(diagnosis))
    if diagnosis.ways:
        console.print(_ways(diagnosis))
    for finding in diagnosis.findings:
        console.print(described(finding), soft_wrap=True)
    num_errors = sum(finding.severity == "error" for finding in diagnosis.findings)
    if num_errors:
        console.print(f"{num_errors} finding(s) that stop training.", style="bold red")
    else:
        console.print("Nothing that stops training.", style="green")


def described(finding: Finding) -> Text:
    """Return a finding as two lines; the second says what to type."""
    text = Text()
    text.append(f"{finding.severity}", style=_STYLES[finding.severity])
    text.append(f" [{finding.code}] {_printable(finding.where)}: {_printable(finding.what)}\n")
    text.append(f"    type: {_printable(finding.todo)}", style="bold")
    return text


def _devices(diagnosis: Diagnosis) -> Table:
    table = Table(box=SIMPLE_HEAD, title="devices", title_justify="left")
    for heading in ("host", "device", "UUID", "memory", "driver", "computes"):
        table.add_column(heading, overflow="fold")
    for facts in diagnosis.hosts:
        for device in facts.devices:
            driver = device.driver or "-"
            table.add_row(
                *_plain(
                    facts.host,
                    device.name,
                    device.uuid or "-",
                    format_bytes(device.memory_bytes) if device.memory_bytes else "-",
                    f"{driver}, {device.capability}" if device.capability else driver,
                    " ".join(device.dtypes),
                )
            )
    return table


def _hosts(diagnosis: Diagnosis) -> Table:
    table = Table(box=SIMPLE_HEAD, title="hosts", title_justify="left")
    for heading in ("host", "ragtag", "torch", "python", "cores", "memory", "files", "/dev/shm"):
        table.add_column(heading, overflow="fold")
    for facts in diagnosis.hosts:
        shared = facts.shared_memory_bytes
        table.add_row(
            *_plain(
                facts.host,
                facts.ragtag or "?",
                facts.torch.version or "none",
                facts.python or "?",
                _cores(facts),
                format_bytes(min(facts.memory_bytes, facts.memory_limit_bytes or facts.memory_bytes)),
                str(facts.open_files or "no limit"),
                "-" if shared is None else format_bytes(shared),
            )
        )
    return table


def _cores(facts: HostFacts) -> str:
    quota = facts.cpu_quota_cores
    usable = facts.cores_allowed or facts.cores
    return f"{usable} (quota {quota:g})" if quota is not None and quota < usable else str(usable)


def _interfaces(diagnosis: Diagnosis) -> Table:
    table = Table(box=SIMPLE_HEAD, title="interfaces", title_justify="left")
    for heading in ("host", "interface", "MTU", "addresses"):
        table.add_column(heading, overflow="fold")
    for facts in diagnosis.hosts:
        for each in facts.interfaces:
            name = each.name if each.up else f"{each.name} (down)"
            table.add_row(*_plain(facts.host, name, str(each.mtu or "-"), "\n".join(each.addresses) or "-"))
    return table


def _ways(diagnosis: Diagnosis) -> Table:
    table = Table(box=SIMPLE_HEAD, title="who reaches whom", title_justify="left")
    for heading in ("from", "to", "address", "port", "interface", "one way"):
        table.add_column(heading, overflow="fold")
    for way in diagnosis.ways:
        outcome = Text(_outcome(way), style="" if way.ok else _STYLES["error"])
        port = f"{way.port} (doctor's)" if way.control else str(way.port)
        table.add_row(*_plain(way.source, way.target, way.address, port, way.interface or "none"), outcome)
    return table


def _outcome(way: Way) -> str:
    return f"{1e3 * way.latency_s:.2f} ms" if way.latency_s is not None else f"fails at {way.stage}: {way.error}"


def _plain(*cells: str) -> list[Text]:
    """Cells that are not read as markup."""
    return [Text(_printable(cell)) for cell in cells]


def _printable(text: str) -> str:
    """Names come from other hosts: without control characters, which a terminal would obey."""
    return "".join(letter for letter in text if letter.isprintable() or letter == "\n")
