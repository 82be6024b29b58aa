"""Training on CUDA against training on the CPU: the same losses, nothing touched by what is not finite, no wait in a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch

from slipstream.config.recipe import ObjectiveSection, OptimizerSection
from slipstream.drafter import DFlashDrafter, batch_to, build_drafter
from slipstream.launch.bench import SHAPES, DrafterWork
from slipstream.launch.bench.drafter_work import make_columns
from slipstream.objective import block_loss
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.prefetch import PreparedColumn

pytestmark = pytest.mark.gpu
SHAPE = dataclasses.replace(
    SHAPES["smollm2"], num_layers=2, tap_layers=(1, 3), layer_types=("full", "full"), hidden_size=64, intermediate_size=96,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=517, mask_token_id=516, initializer_range=0.1,
)  # fmt: skip
WORK = DrafterWork(documents=2, document_tokens=128, anchors=64, packs=2, chunk_rows=256)
OBJECTIVE = ObjectiveSection(chunk_rows=256, weight="dpace")
SECTION = OptimizerSection(lr=3e-4, weight_decay=0.1)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled() -> Iterator[None]:
    """Test modules have shapes of their own; a run has few, and fails beyond a limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Run:
    """A drafter, its optimizer and two packs on one device."""

    def __init__(self, *, device: str, dtype: str) -> None:
        attention = "flex" if device == "cuda" else "sdpa"
        self.device = device
        self.drafter: DFlashDrafter = build_drafter(shape=SHAPE, dtype=dtype, device=device, seed=1, attention=attention)
        self.optimizer = FlatAdamW(self.drafter, section=SECTION)
        self.columns = make_columns(shape=SHAPE, work=WORK)[0]
        generator = torch.Generator().manual_seed(2)
        size = (WORK.documents * WORK.document_tokens, SHAPE.num_taps, SHAPE.hidden_size)
        self.hidden = [torch.randn(size, generator=generator).to(self.drafter.dtype).to(device) for _ in self.columns]
        head = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator) * 0.2
        self.head = head.to(self.drafter.dtype).to(device)

    def loss(self, column: PreparedColumn) -> torch.Tensor:
        """Mean loss of a pack, with its graph."""
        masks, batch = self.drafter.make_masks(column.batch), batch_to(column.batch, device=self.device)
        hidden = self.hidden[column.use.pack_id]
        blocks = self.drafter(hidden_TKD=hidden, batch=batch, embedding_VD=self.head, masks=masks)
        sums = block_loss(hidden_NBD=blocks, head_VD=self.head, batch=batch, objective=OBJECTIVE)
        return sums.loss_sum / column.batch.num_rows / len(self.columns)

    def step(self, *, poison: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Both packs, then an update; the loss and whether it was made."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for column in self.columns:
            loss = self.loss(column)
            loss.backward()
            total = total + loss.detach()
        if poison is not None:
            self.optimizer.gradient[5] = poison
        _, good = self.optimizer.step(learning_rate=3e-4, finite=torch.isfinite(total))
        return total, good


def test_fp32_losses_are_the_cpus_after_fifty_steps() -> None:
    losses = {device: [run.step()[0].cpu() for _ in range(50)] for device in ("cpu", "cuda") for run in [_run(device)]}
    assert losses["cpu"][-1] < 0.8 * losses["cpu"][0]
    torch.testing.assert_close(torch.stack(losses["cuda"]), torch.stack(losses["cpu"]), rtol=1e-3, atol=0)


def _run(device: str) -> Run:
    return Run(device=device, dtype="float32")


def test_bf16_losses_are_the_cpus_when_each_step_starts_from_its_weights() -> None:
    cpu, cuda = (Run(device=device, dtype="bfloat16") for device in ("cpu", "cuda"))
    for _ in range(20):
        cuda.optimizer.load_state(cpu.optimizer.state())
        wanted, ours = cpu.step()[0], cuda.step()[0]
        torch.testing.assert_close(ours.cpu(), wanted, rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", ["gradient", "row", "head"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_touches_nothing(where: str, value: float, dtype: str) -> None:
    run = Run(device="cuda", dtype=dtype)
    run.step()
    weights = [weight.detach().clone() for weight in run.drafter.parameters()]
    before, kept = run.optimizer.state(), (run.hidden[0].clone(), run.head.clone())
    if where == "row":
        run.hidden[0][40] = value
    if where == "head":
        run.head[7] = value
    _, good = run.step(poison=value if where == "gradient" else None)
    assert not bool(good)
    after = run.optimizer.state()
    for part in ("master", "exp_avg", "exp_avg_sq"):
        old, new = getattr(before, part), getattr(after, part)
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert torch.equal(before.good_steps, after.good_steps)
    assert all(torch.equal(old, new) for old, new in zip(weights, run.drafter.parameters(), strict=True))
    run.hidden[0], run.head = kept
    assert bool(run.step()[1])


def test_a_step_does_not_wait_and_validation_compiles_nothing_after_warm_up() -> None:
    from torch._dynamo.utils import counters

    run = Run(device="cuda", dtype="bfloat16")

    def everything() -> None:
        run.step()
        with torch.no_grad():
            run.loss(run.columns[0])

    for _ in range(3):
        everything()
    before = counters["stats"]["unique_graphs"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counters["stats"]["unique_graphs"] == before


def test_a_parameter_without_a_gradient_keeps_none_of_the_last_steps() -> None:
    run = Run(device="cuda", dtype="bfloat16")
    run.step()
    before = run.optimizer.exp_avg.clone()
    run.optimizer.zero_grad()
    norm, good = run.optimizer.step(learning_rate=0.0, finite=torch.ones((), dtype=torch.bool, device="cuda"))
    assert bool(good)
    assert float(norm) == 0.0
    torch.testing.assert_close(run.optimizer.exp_avg, before * SECTION.beta1)
