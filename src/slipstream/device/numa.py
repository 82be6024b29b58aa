"""Which memory and which cores lie next to a GPU, and how a process stays there. No torch, no libnuma.

A machine with several sockets has its memory in nodes; a GPU hangs on one of them, and a copy from another node crosses the
link between sockets. So a process is bound to the node of its GPU before it touches or page-locks memory: its threads to the
node's cores, its new pages to the node's memory as long as there is any. Where sysfs says nothing, nothing is bound.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSFS = Path("/sys")

_PREFERRED = 1
"""MPOL_PREFERRED of the kernel: from this node while it has memory, from others then."""
_WORD_BITS = 64
_CALLS: Mapping[str, Mapping[str, int]] = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238},
    "aarch64": {"mbind": 235, "set_mempolicy": 237},
}
"""Numbers of the system calls, by machine."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A node and those of its cores that the process may run on; none where it may run on none of them."""

    node: int
    cores: tuple[int, ...]

    def as_job(self) -> dict[str, Any]:
        """For a child's job."""
        return {"node": self.node, "cores": list(self.cores)}

    @classmethod
    def of_job(cls, job: Mapping[str, Any]) -> Binding:
        """What `as_job` gave."""
        return cls(node=int(job["node"]), cores=tuple(job["cores"]))

    def __str__(self) -> str:
        return f"node {self.node}, cores {ranges(self.cores) or 'as before: none of its own may be used'}"


def node_of(pci_id: str | None, *, sysfs: Path = SYSFS) -> int | None:
    """The node of a PCI device, "0000:3b:00.0"; None where the machine has no nodes, or does not say."""
    if pci_id is None:
        return None
    text = _read(sysfs / "bus/pci/devices" / pci_id.lower() / "numa_node")
    return None if text is None or int(text) < 0 else int(text)


def cores_of(node: int, *, sysfs: Path = SYSFS) -> tuple[int, ...]:
    """The cores of a node, ascending."""
    text = _read(sysfs / f"devices/system/node/node{node}/cpulist")
    return () if text is None else tuple(numbers(text))


def binding_of(pci_id: str | None, *, allowed: Sequence[int], sysfs: Path = SYSFS) -> Binding | None:
    """Where a process with that GPU belongs, as far as it may run on `allowed` cores; None where sysfs does not say."""
    node = node_of(pci_id, sysfs=sysfs)
    if node is None:
        return None
    return Binding(node=node, cores=tuple(sorted(set(cores_of(node, sysfs=sysfs)) & set(allowed))))


def bind_process(binding: Binding) -> str:
    """Bind this process, threads that run already included; returns in words what was done and what was refused."""
    cores = "cores as before"
    if binding.cores:
        for task in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # a thread may end meanwhile
                os.sched_setaffinity(int(task), binding.cores)
        cores = f"cores {ranges(binding.cores)}"
    mask, length = _mask(binding.node)
    refused = _call("set_mempolicy", ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(length))
    memory = "memory preferred there" if refused is None else f"memory by first touch: the kernel refused a policy, {refused}"
    return f"NUMA node {binding.node}: {cores}, {memory}"


def prefer_node(memory: mmap.mmap, node: int) -> str | None:
    """Have pages of a shared mapping taken from a node, whoever touches them first; returns why not, None when done."""
    view = ctypes.c_char.from_buffer(memory)
    mask, length = _mask(node)
    try:
        address = ctypes.c_void_p(ctypes.addressof(view))
        size = ctypes.c_ulong(len(memory))
        return _call("mbind", address, size, ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(length), ctypes.c_uint(0))
    finally:
        del view


def numbers(text: str) -> list[int]:
    """The kernel's lists, "0-3,8", as numbers."""
    found: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.extend(range(int(first), int(last or first) + 1))
    return found


def ranges(cores: Sequence[int]) -> str:
    """Numbers as the kernel lists them."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _mask(node: int) -> tuple[Any, int]:
    """A set of nodes as the kernel reads it, and its length; the kernel looks at one bit less than the length says."""
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    return mask, words * _WORD_BITS + 1


def _call(name: str, *arguments: Any) -> str | None:
    """A system call that returns 0; else the error's name."""
    number = _CALLS.get(platform.machine(), {}).get(name)
    if number is None:
        return f"{name} is not known on {platform.machine()}"
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ctypes.c_long(number), *arguments) == 0:
        return None
    return errno.errorcode.get(ctypes.get_errno(), str(ctypes.get_errno()))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # no sysfs, or none of that device: nothing is known
        return None
