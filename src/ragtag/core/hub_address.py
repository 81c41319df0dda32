"""How a hub's address is written, and whether anybody else can reach it."""

from ragtag.core.errors import SettingError


def hub_address(text: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[ipv6]:port". Raises SettingError for anything else."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise SettingError(f"The hub's address is {text!r}. Expected HOST:PORT, as `ragtag launch` prints it.")
    return host, int(port)


def written(host: str, port: int) -> str:
    """Return "host:port", or "[ipv6]:port"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether an address, or the name that always means one, is inside this machine."""
    return address.startswith("127.") or address in ("::1", "localhost")
