"""Anonymous shared memory: exact, nameless, limited with a clear word, gone with its last holder."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys

import pytest
import torch

from slipstream.device import shared
from slipstream.device.shared import SharedMemory
from slipstream.errors import PreflightError, TransportError

_CHILD = """
import sys, torch
from slipstream.device.shared import SharedMemory
memory = SharedMemory.attach(int(sys.argv[1]), 4096)
tensor = memory.tensor(dtype=torch.int32, shape=(1024,), offset=0)
assert int(tensor[7]) == 41
tensor[7] += 1
"""


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_child_reads_and_writes_it_and_nothing_has_a_name() -> None:
    names, open_before = set(os.listdir("/dev/shm")), descriptors()
    memory = SharedMemory.create(4096)
    tensor = memory.tensor(dtype=torch.int32, shape=(1024,), offset=0)
    assert not tensor.any()
    tensor[7] = 41
    subprocess.run([sys.executable, "-c", _CHILD, str(memory.fd)], pass_fds=[memory.fd], check=True, timeout=120)
    assert int(tensor[7]) == 42
    assert set(os.listdir("/dev/shm")) == names
    memory.close()
    memory.close()
    assert int(tensor[7]) == 42  # tensors outlive the handle
    del tensor
    assert descriptors() == open_before


def test_its_size_is_exact_and_cannot_change() -> None:
    memory = SharedMemory.create(12345)
    assert os.fstat(memory.fd).st_size == 12345
    for size in (100, 99999):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    with pytest.raises(TransportError, match="holds 12345 bytes, 12346 were agreed on"):
        SharedMemory.attach(memory.fd, 12346)
    memory.close()
    with pytest.raises(AssertionError, match="closed"):
        memory.tensor(dtype=torch.int8, shape=(1,), offset=0)


def test_a_descriptor_that_was_not_handed_over_is_named() -> None:
    with pytest.raises(TransportError, match="descriptor 987 was not handed"):
        SharedMemory.attach(987, 1)


def test_tensors_are_where_they_should_be() -> None:
    memory = SharedMemory.create(4096)
    whole = memory.tensor(dtype=torch.uint8, shape=(4096,), offset=0)
    memory.tensor(dtype=torch.float32, shape=(2, 3), offset=128).fill_(1.0)
    assert whole.nonzero().min() >= 128
    assert whole.nonzero().max() < 128 + 24
    memory.close()


def test_more_than_there_is_is_refused_before_it_is_made() -> None:
    open_before = descriptors()
    with pytest.raises(PreflightError, match=r"shared memory for slots = '1048576\.00 GiB': is more than the available memory"):
        SharedMemory.create(2**50)
    assert descriptors() == open_before


@pytest.mark.parametrize(
    ("limit", "word"), [(resource.RLIMIT_FSIZE, "ulimit -f"), (resource.RLIMIT_AS, "ulimit -v")], ids=["file", "address"]
)
def test_rlimits_are_refused_by_name(limit: int, word: str) -> None:
    code = f"""
import resource, sys
from slipstream.device.shared import SharedMemory
from slipstream.errors import PreflightError
resource.setrlimit({limit}, (2**30, 2**30))
SharedMemory.create(2**20).close()
try:
    SharedMemory.create(2**30 + 2**20)
except PreflightError as error:
    sys.exit(0 if {word!r} in str(error) else str(error))
sys.exit("not refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failure_on_the_way_leaks_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    open_before = descriptors()

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(shared.mmap, "mmap", fail)
    with pytest.raises(OSError, match="no"):
        SharedMemory.create(4096)
    assert descriptors() == open_before
