"""Connections between processes of one host: a socket pair whose ends are handed over by file descriptor.

Only messages of some hundred bytes cross them. The end handed to a child must be closed in the parent once the child
runs, or the child's death goes unnoticed.
"""

from __future__ import annotations

import contextlib
import os
import socket
from multiprocessing.connection import Connection


def connection_pair() -> tuple[Connection, Connection]:
    """Two ends, both ways; neither is inherited unless passed on (`Popen(pass_fds=[end.fileno()])`)."""
    ends = socket.socketpair()
    first, second = (Connection(end.detach()) for end in ends)
    return first, second


def connection_from_fd(fd: int) -> Connection:
    """The end that was handed to this process as file descriptor `fd`; owns it from here on, and hands it to no child."""
    os.set_inheritable(fd, False)
    return Connection(fd)


def shut_down(connection: Connection) -> None:
    """End both directions, so that a thread of ours that reads from it wakes up. What was sent can still be read."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end, contextlib.suppress(OSError):  # the peer may be gone
        end.shutdown(socket.SHUT_RDWR)


def stop_reading(connection: Connection) -> None:
    """A thread of ours that reads from it hears that it ended, once it has read what came before. The peer notices nothing."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end, contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RD)
