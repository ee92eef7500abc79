"""A listening socket, opened before models are loaded."""

from __future__ import annotations

import socket

from imdm.core.errors import UserError


def listen(host: str, port: int) -> socket.socket:
    """Listens on an address of this machine; port 0 takes a free one. Connections wait until they are accepted."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        opened = socket.create_server(address[:2], family=family, backlog=1024)
        # asyncio switches Nagle's algorithm off for sockets that name their protocol. With it a response that is
        # written in two parts waits some 40 ms for the client to acknowledge the first.
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=opened.detach())
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot listen on {host}, port {port} ({reason}); choose another port or host") from None
