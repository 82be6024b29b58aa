"""How much memory and how many cores this process may use: the machine's, cut by cgroup, affinity and rlimits."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_CGROUP_OF_PROCESS = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_memory(
    *, meminfo: Path = _MEMINFO, cgroup_root: Path = _CGROUP_ROOT, cgroup_of_process: Path = _CGROUP_OF_PROCESS
) -> int:
    """Bytes of memory that can still be filled without swapping or meeting the cgroup's limit."""
    machine = _field_kib(meminfo, "MemAvailable") * 1024
    left = [_left_in(folder) for folder in _cgroup_folders(cgroup_root, cgroup_of_process)]
    return min([machine, *(limit for limit in left if limit is not None)])


def available_address_space() -> int | None:
    """Bytes of address space left under `ulimit -v`; None where it is unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    used = int(_STATM.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return max(0, soft - used)


def largest_file() -> int | None:
    """Bytes that one file may have under `ulimit -f`, anonymous files included; None where it is unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def available_cores(*, cgroup_root: Path = _CGROUP_ROOT, cgroup_of_process: Path = _CGROUP_OF_PROCESS) -> int:
    """Cores this process may run on, at least 1: its affinity, cut by the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders(cgroup_root, cgroup_of_process):
        quota = _read(folder / "cpu.max")
        if quota is None or quota.startswith("max"):
            continue
        allowed, period = (int(word) for word in quota.split()[:2])
        cores = min(cores, max(1, allowed // period))
    return cores


def _cgroup_folders(root: Path, of_process: Path) -> list[Path]:
    """Folders of this process's cgroup and all above it (v2): a limit on any of them binds."""
    text = _read(of_process) or ""
    path = next((line[3:] for line in text.splitlines() if line.startswith("0::")), "/")
    folders = [root]
    for part in Path(path).parts[1:]:
        folders.append(folders[-1] / part)
    return folders


def _left_in(cgroup: Path) -> int | None:
    """Bytes left under a cgroup's limit, None without one; inactive file cache counts as free, as the kernel drops it first."""
    limit, current = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit is None or current is None or limit.strip() == "max":
        return None
    stat = _read(cgroup / "memory.stat") or ""
    cache = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0)
    return max(0, int(limit) - int(current) + cache)


def _field_kib(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise OSError(f"{path} has no {name}")


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # no cgroup v2 here, or not readable: it then sets no limit that we could know of
        return None
