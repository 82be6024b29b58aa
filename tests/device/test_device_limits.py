"""Memory and cores as the machine, the cgroup and the affinity allow."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.device.limits import available_cores, available_memory


def make_cgroup(root: Path, **files: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("_", ".", 1)).write_text(text)
    return root


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_available_memory_is_the_least_of_machine_and_cgroups(tmp_path: Path) -> None:
    meminfo = write(tmp_path / "meminfo", "MemTotal: 100 kB\nMemAvailable:     50 kB\n")
    own = write(tmp_path / "own", "1:cpu:/old\n0::/a/b\n")
    root = make_cgroup(tmp_path / "cgroup")

    def available() -> int:
        return available_memory(meminfo=meminfo, cgroup_root=root, cgroup_of_process=own)

    assert available() == 50 * 1024
    make_cgroup(root / "a" / "b", memory_max="max\n", memory_current="5\n")
    assert available() == 50 * 1024
    make_cgroup(root / "a", memory_max="10000\n", memory_current="9000\n", memory_stat="anon 7\ninactive_file 600\n")
    assert available() == 1600
    make_cgroup(root / "a" / "b", memory_max="100\n", memory_current="900\n")
    assert available() == 0


def test_this_machine_has_memory() -> None:
    assert 2**20 < available_memory() < 2**50


def test_cores_are_cut_by_the_quota(tmp_path: Path) -> None:
    own = write(tmp_path / "own", "0::/a\n")
    root = tmp_path / "cgroup"

    def cores() -> int:
        return available_cores(cgroup_root=root, cgroup_of_process=own)

    assert cores() == len(os.sched_getaffinity(0))
    make_cgroup(root / "a", cpu_max="max 100000\n")
    assert cores() == len(os.sched_getaffinity(0))
    make_cgroup(root / "a", cpu_max="100000 100000\n")
    assert cores() == 1
    make_cgroup(root / "a", cpu_max="10000 100000\n")
    assert cores() == 1
