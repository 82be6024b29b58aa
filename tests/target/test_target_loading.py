"""Weights of the type that they are loaded in are the files' own pages; what is copied is what the memory plan counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_targets import save_target
from torch import Tensor

from slipstream.plan.weights import count_converted
from slipstream.target.ends import load_frozen_ends
from slipstream.target.loading import load_decoder

DEPTH = 2


def mapped_from(folder: Path) -> Callable[[Tensor], bool]:
    """Whether a tensor's first byte is in a mapping of a file of that folder, by what the kernel says of this process."""
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors") and str(folder) in line:
            start, _, stop = line.split()[0].partition("-")
            spans.append(range(int(start, 16), int(stop, 16)))
    return lambda tensor: any(tensor.data_ptr() in span for span in spans)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # the files are in fp32
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_what_loading_copies_is_what_the_memory_plan_counts(tmp_path: Path, kind: str, dtype: str) -> None:
    info = save_target(tmp_path, kind, tied=False)
    counted = count_converted(info, dtype=dtype, depth=DEPTH)
    assert (counted.decoder > 0) == (dtype == "bfloat16")
    model = load_decoder(info=info, dtype=dtype, device="cpu", num_layers=DEPTH)
    is_mapped = mapped_from(tmp_path)
    copied = [weight for weight in model.parameters() if not is_mapped(weight)]
    assert sum(weight.numel() for weight in copied) == counted.decoder
    ends = load_frozen_ends(info=info, dtype=dtype, host_embedding=True)
    is_mapped = mapped_from(tmp_path)
    assert is_mapped(ends.embedding_VD) == (counted.embedding == 0)
    assert counted.embedding in (0, ends.embedding_VD.numel())
