"""A listening socket, opened before any slow work; this module imports nothing heavy."""

from __future__ import annotations

import socket

from imdm.errors import UserError


def listen(host: str, port: int) -> socket.socket:
    """Listens on an address of this machine; port 0 takes a free one. Connections wait until they are accepted."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot listen on {host}, port {port} ({reason}); choose another port or host") from None
