"""Anonymous memory that processes share by file descriptor.

`memfd` rather than /dev/shm: it has no name that a killed process could leave behind, is not bounded by a container's
64 MB of /dev/shm, and a restarted worker is simply handed the same descriptor. The kernel frees it with the last
process that holds it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.device.limits import available_address_space, available_memory, largest_file
from slipstream.errors import PreflightError, TransportError

if TYPE_CHECKING:
    import torch

# The size can be trusted for good: a descriptor that shrank under a mapping would kill its readers with SIGBUS.
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def tensor_over(buffer: mmap.mmap, *, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor over `buffer` from byte `offset` on, with a storage and a version counter of its own.

    Made outside inference mode whatever the caller's mode: a tensor born inside could not be saved for backward.
    """
    import torch  # here, not above: the supervisor makes the memory and never looks into it

    count = 1
    for size in shape:
        count *= size
    with torch.inference_mode(False):
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)


class SharedMemory:
    """`nbytes` of zeroed anonymous memory, mapped here and in every process that is handed `fd`.

    Pages are taken when first written to. Tensors made from it keep the mapping alive after `close()`.
    """

    def __init__(self, *, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self._map: mmap.mmap | None = mmap.mmap(fd, nbytes)

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """Make `nbytes` of new memory; PreflightError if this machine or a limit of this process cannot hold it."""
        check_room([nbytes])
        fd = os.memfd_create("slipstream", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE)
            return cls(fd=fd, nbytes=nbytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> SharedMemory:
        """Map memory whose descriptor was inherited; owns `fd` from here on. TransportError if it is not `nbytes` long."""
        try:
            found = os.fstat(fd).st_size
        except OSError as error:
            raise TransportError(f"shared memory: file descriptor {fd} was not handed to this process") from error
        if found != nbytes:
            raise TransportError(f"shared memory: file descriptor {fd} holds {found} bytes, {nbytes} were agreed on")
        return cls(fd=fd, nbytes=nbytes)

    @property
    def mapping(self) -> mmap.mmap:
        """The bytes, as mapped here."""
        assert self._map is not None, "shared memory is closed"
        return self._map

    def tensor(self, *, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """A tensor over these bytes from byte `offset` on, with its own version counter."""
        return tensor_over(self.mapping, dtype=dtype, shape=shape, offset=offset)

    def close(self) -> None:
        """Let go of the descriptor and, once the last tensor over it is gone, of the mapping. May be called twice."""
        if self._map is None:
            return
        # Dropped, not closed: `torch.frombuffer` holds the mapping but does not lock it, so closing it would unmap the
        # bytes under tensors that are still in use.
        self._map = None
        os.close(self.fd)


def check_room(sizes: Sequence[int]) -> None:
    """Raise `PreflightError` if this machine or a limit of this process cannot hold pieces of so many bytes, all at once.

    Pages are taken when first written to: a machine would find out in the middle of a run, and end some process of its choice.
    """
    assert all(size > 0 for size in sizes), "shared memory needs a size"
    limits = (
        (sum(sizes), "available memory", available_memory()),
        (sum(sizes), "address space left under `ulimit -v`", available_address_space()),
        (max(sizes, default=0), "largest file under `ulimit -f`", largest_file()),
    )
    for nbytes, what, limit in limits:
        if limit is not None and nbytes > limit:
            raise PreflightError(
                key="shared memory for slots",
                value=f"{nbytes / 2**30:.2f} GiB",
                rule=f"is more than the {what}, {limit / 2**30:.2f} GiB",
                hint="lower plan.replays, plan.replay_distance, plan.ahead_packs, plan.packs_per_step or plan.pack_tokens",
            )
