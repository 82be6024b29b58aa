"""Connections between processes of one host: a socket pair whose ends are handed over by file descriptor.

Only messages of some hundred bytes cross them. The end handed to a child must be closed in the parent once the child
runs, or the child's death goes unnoticed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterable
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


def has_room(connection: Connection) -> bool:
    """Whether a message of some hundred bytes can be sent without waiting for the peer to read, or the peer is gone.

    The kernel says so while a quarter of the buffer at most is taken: it holds fewer than two hundred such messages.
    """
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(0))


def wait_for(readable: Iterable[Connection], *, with_room: Iterable[Connection]) -> list[Connection]:
    """Sleep until one can be read from, or has room; returns those that can be read from."""
    poll = select.poll()
    by_number = {connection.fileno(): connection for connection in readable}
    masks = dict.fromkeys(by_number, select.POLLIN)
    for connection in with_room:
        masks[connection.fileno()] = masks.get(connection.fileno(), 0) | select.POLLOUT
    for number, mask in masks.items():
        poll.register(number, mask)
    return [by_number[number] for number, found in poll.poll() if found & ~select.POLLOUT and number in by_number]
