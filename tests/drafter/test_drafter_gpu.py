"""On CUDA: compiled flex attention against SDPA on the CPU, forward and backward, and no wait for the GPU in a pass."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from block_cases import MASK_TOKEN, make_case, make_embedding, make_shape

from slipstream.config.recipe import LayerType, ObjectiveSection
from slipstream.drafter import batch_to, build_drafter, elementwise
from slipstream.objective import block_loss

pytestmark = pytest.mark.gpu
OBJECTIVE = ObjectiveSection(chunk_rows=64, weight="dpace")


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled() -> Iterator[None]:
    """Test modules have shapes of their own; a run has few, and fails beyond a limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("attention", ["flex", "sdpa"])
@pytest.mark.parametrize(("layers", "window"), [(("full", "full"), None), (("sliding", "full"), 9)])
def test_a_pass_on_cuda_equals_the_cpus_and_never_waits(
    attention: str, layers: Sequence[LayerType], window: int | None
) -> None:
    case = make_case(lengths=(100, 60, 80), capacity=256, slots=96, block=8, chunk_rows=64)
    shape = make_shape(layer_types=layers, window=window, block=8)
    results = []
    for device in ("cpu", "cuda"):
        name = attention if device == "cuda" else "sdpa"
        drafter = build_drafter(shape=shape, dtype="float32", device=device, seed=1, attention=name)
        masks, batch = drafter.make_masks(case.batch), batch_to(case.batch, device=device)
        hidden, embedding = case.hidden_TKD.to(device), make_embedding().to(device)
        hidden[case.pack.num_tokens :] = float("nan")
        for attempt in range(2):  # the first compiles
            drafter.zero_grad()
            if device == "cuda" and attempt:
                torch.cuda.set_sync_debug_mode("error")
            try:
                blocks = drafter(hidden_TKD=hidden, batch=batch, embedding_VD=embedding, masks=masks)
                loss = block_loss(hidden_NBD=blocks, head_VD=embedding, batch=batch, objective=OBJECTIVE)
                loss.loss_sum.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append([blocks.detach()[:, 1:], loss.loss_sum.detach(), *(weight.grad for weight in drafter.parameters())])
    for ours, wanted in zip(results[1], results[0], strict=True):
        assert float((ours.cpu() - wanted).norm() / wanted.norm()) < 1e-4


def test_blocks_that_are_cut_are_the_cpus() -> None:
    """The mask that validation takes near the longest answer: each block ends at its own slot."""
    case = make_case(lengths=(100, 60, 80), capacity=256, slots=96, block=8, chunk_rows=64)
    lengths = np.random.default_rng(0).integers(1, 9, 96)
    left = torch.arange(8) < torch.from_numpy(lengths)[:, None]
    left[:, 0] = False
    results = []
    for device in ("cpu", "cuda"):
        drafter = build_drafter(shape=make_shape(block=8), dtype="float32", device=device, seed=1, attention="auto")
        masks, batch = drafter.make_masks(case.batch, lengths=lengths), batch_to(case.batch, device=device)
        with torch.no_grad():
            hidden, embedding = case.hidden_TKD.to(device), make_embedding().to(device)
            results.append(drafter(hidden_TKD=hidden, batch=batch, embedding_VD=embedding, masks=masks).cpu()[left])
    assert float((results[1] - results[0]).norm() / results[0].norm()) < 1e-4


def test_a_block_at_a_new_length_costs_what_one_at_an_old_length_does() -> None:
    """A kernel that is planned for each pair of lengths would cost decoding, and validation, tens of milliseconds a token."""
    shape = make_shape(block=8)
    drafter = build_drafter(shape=shape, dtype="bfloat16", device="cuda", seed=1, attention="auto")
    embedding = make_embedding().to("cuda", torch.bfloat16)
    hidden = torch.randn(300, shape.num_taps, shape.hidden_size, device="cuda", dtype=torch.bfloat16)
    context, block = drafter.new_context(), torch.tensor([9] + [MASK_TOKEN] * 7)
    drafter.extend_context(context, hidden, 0)

    def seconds(lengths: range) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for length in lengths:
            drafter.draft(context, block, length, embedding)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(range(20, 24))
    new, old = seconds(range(100, 164)), seconds(range(100, 164))
    assert new < 2 * old, (new, old)


def test_gradients_inside_an_mlp_take_no_memory_and_are_those_of_three_new_tensors() -> None:
    def apart(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide, a, b = grad.float(), gate.float(), up.float()
        share = torch.sigmoid(a)
        silu = a * share
        return tuple(t.to(grad.dtype) for t in (wide * b * (share + silu * (1.0 - share)), wide * silu, silu * b))

    tensors = [torch.randn(1024, 4352, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    wanted = torch.compile(apart, dynamic=False, fullgraph=True)(*tensors)
    elementwise.run(elementwise.gated_backward, *(tensor.clone() for tensor in tensors))  # compiles
    grad, gate, up = (tensor.clone() for tensor in tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    elementwise.run(elementwise.gated_backward, grad, gate, up)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    assert all(torch.equal(ours, theirs) for ours, theirs in zip((gate, up, grad), wanted, strict=True))
