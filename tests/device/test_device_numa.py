"""Which node a GPU is on, which cores are its own, and that a process stays there, on made-up sysfs trees and for real."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.device.numa import Binding, binding_of, cores_of, node_of, numbers, prefer_node, ranges
from slipstream.device.shared import SharedMemory


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two nodes of four cores with one GPU each, and a GPU that hangs on no node."""
    for pci_id, node in (("0000:3b:00.0", 0), ("0000:af:00.0", 1), ("0000:01:00.0", -1)):
        device = tmp_path / "bus/pci/devices" / pci_id
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    for node, cores in ((0, "0-1,4-5\n"), (1, "2-3,6-7\n")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    return tmp_path


def test_the_node_is_the_gpu_s(sysfs: Path) -> None:
    assert [node_of(pci_id, sysfs=sysfs) for pci_id in ("0000:3b:00.0", "0000:AF:00.0")] == [0, 1]
    assert cores_of(1, sysfs=sysfs) == (2, 3, 6, 7)


@pytest.mark.parametrize("pci_id", [None, "0000:01:00.0", "0000:99:00.0"])
def test_where_nothing_is_said_nothing_is_bound(sysfs: Path, tmp_path: Path, pci_id: str | None) -> None:
    assert binding_of(pci_id, allowed=range(8), sysfs=sysfs) is None
    assert binding_of("0000:3b:00.0", allowed=range(8), sysfs=tmp_path / "none") is None


def test_only_cores_that_the_process_may_use(sysfs: Path) -> None:
    binding = binding_of("0000:af:00.0", allowed=(0, 2, 7), sysfs=sysfs)
    assert binding == Binding(node=1, cores=(2, 7))
    assert Binding.of_job(binding.as_job()) == binding
    elsewhere = binding_of("0000:af:00.0", allowed=(0, 1), sysfs=sysfs)
    assert elsewhere == Binding(node=1, cores=())
    assert "as before" in str(elsewhere)


@pytest.mark.parametrize(("text", "listed"), [("", []), ("3", [3]), ("0-2,8", [0, 1, 2, 8]), ("0-1,3-4", [0, 1, 3, 4])])
def test_lists_are_the_kernel_s(text: str, listed: list[int]) -> None:
    assert numbers(text + "\n") == listed
    assert ranges(listed) == text


def test_a_process_stays_where_it_was_bound() -> None:
    """In a process of its own: a thread that runs already is moved, a later one and a child begin there."""
    core = min(os.sched_getaffinity(0))
    code = f"""
import os, threading
from slipstream.device.numa import Binding, bind_process
leave = threading.Event()
thread = threading.Thread(target=leave.wait)
thread.start()
said = bind_process(Binding(node=0, cores=({core},)))
tasks = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
assert tasks == [{{{core}}}] * 2, tasks
leave.set()
assert said.startswith("NUMA node 0: cores {core}, memory "), said
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_pages_of_a_pool_are_preferred_on_a_node_or_the_refusal_is_told() -> None:
    memory = SharedMemory.create(1 << 20)
    refused = prefer_node(memory.mapping, 0)
    policy = ctypes.c_int(-1)
    view = ctypes.c_char.from_buffer(memory.mapping)
    library = ctypes.CDLL(None, use_errno=True)
    # get_mempolicy of an address (MPOL_F_ADDR), only known here for x86-64
    asked = library.syscall(239, ctypes.byref(policy), None, ctypes.c_ulong(0), ctypes.c_void_p(ctypes.addressof(view)), 2)
    del view
    if refused is None:
        assert asked != 0 or policy.value == 1, "MPOL_PREFERRED"
    else:
        assert refused.startswith("E") or "not known" in refused
    assert prefer_node(memory.mapping, 1000) is not None, "no machine has a node 1000"
    memory.mapping[:4] = b"\1\2\3\4"
    memory.close()
