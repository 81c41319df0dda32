"""A socket that listens for a process which is not started yet, or which is started again behind the same address."""

import socket

from ragtag.core.errors import LaunchError


def listening(address: str, port: int, *, what: str, advice: str) -> socket.socket:
    """Return a socket that listens on `address` of this machine, IPv4 or IPv6; port 0: any.

    Raises:
        LaunchError: the address is none of this machine's, or the port is taken; says that `what` cannot listen, and
            `advice`.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(f"{what} cannot listen on {address}, port {port}: {error.strerror}. {advice}") from None
    return listener
