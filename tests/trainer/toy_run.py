"""A whole training run in memory: a planner, a source of hidden states, a drafter and an objective, all tiny and keyed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.config.recipe import OptimizerSection
from slipstream.observe import Account
from slipstream.records import BlockBatch, HiddenPack, Pack, Step, Use
from slipstream.trainer.checkpoint import CheckpointIdentity, read_checkpoint
from slipstream.trainer.column import ColumnPass
from slipstream.trainer.guard import Counters, DivergenceGuard
from slipstream.trainer.hooks import GuardHook, Hook
from slipstream.trainer.loop import Saving, Trainer
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.prefetch import PreparedStep, prepare_step
from slipstream.trainer.ranks import ColumnShare, RankGroup
from slipstream.trainer.reduction import GradientSum
from slipstream.trainer.saving import CheckpointWriter
from slipstream.trainer.tally import StepTally

T, N, B, K, D, V = 128, 8, 4, 2, 16, 32
FINGERPRINT = "toy-target"
IDENTITY = CheckpointIdentity(
    plan_digest="toy-plan", target_fingerprint=FINGERPRINT, drafter_shape={"hidden_size": D}, keys={"optimizer.lr": 1e-2}
)


class ToyPlanner:
    """Every pack is used in two steps running. `empty_steps` have no supervised anchor anywhere."""

    def __init__(self, *, num_columns: int, empty_steps: tuple[int, ...] = ()) -> None:
        self.num_columns = num_columns
        self.empty_steps = empty_steps

    def pack(self, pack_id: int) -> Pack:
        random = np.random.default_rng((1, pack_id))
        starts = np.array([0, 60, 120], dtype=np.int32)
        positions = np.concatenate([np.arange(60), np.arange(60), np.arange(8)]).astype(np.int32)
        tokens = random.integers(1, 5, size=T).astype(np.int32)
        mask = positions >= 0
        mask[120:] = False
        return Pack(
            pack_id=pack_id,
            epoch=0,
            column=pack_id % self.num_columns,
            slot=0,
            document_ids=np.arange(2) + 2 * pack_id,
            starts=starts,
            token_ids=tokens,
            position_ids=positions,
            loss_mask=mask,
        )

    def use(self, step: int, column: int) -> Use:
        random = np.random.default_rng((2, step, column))
        num_valid = 0 if step in self.empty_steps else int(random.integers(3, N + 1))
        anchors = np.zeros(N, dtype=np.int32)
        anchors[:num_valid] = np.sort(random.choice(np.arange(1, 50), size=num_valid, replace=False))
        supervised = np.full(B, num_valid, dtype=np.int64)
        supervised[0] = 0
        return Use(
            step=step,
            pack_id=step // 2 * self.num_columns + column,
            use_number=step % 2,
            anchors=anchors,
            anchor_valid=np.arange(N) < num_valid,
            supervised_per_slot=supervised,
            is_last=step % 2 == 1,
        )

    def step(self, step: int) -> Step:
        uses = tuple(self.use(step, column) for column in range(self.num_columns))
        return Step(index=step, epoch=0, uses=uses, supervised_per_slot=np.sum([u.supervised_per_slot for u in uses], axis=0))


class ToySource:
    """Hidden states keyed by the pack; `damage(pack_id, hidden_TKD)` may change them. Checks what a transport would."""

    def __init__(self, *, damage: Callable[[int, Tensor], None] | None = None, fingerprint: str = FINGERPRINT) -> None:
        self.live: set[int] = set()
        self.released: list[int] = []
        self.damage = damage
        self.fingerprint = fingerprint

    def take(self, pack_id: int) -> HiddenPack:
        assert pack_id not in self.released, f"pack {pack_id} taken after its release"
        self.live.add(pack_id)
        hidden = torch.randn(T, K, D, generator=torch.Generator().manual_seed(1000 + pack_id))
        if self.damage is not None:
            self.damage(pack_id, hidden)
        return HiddenPack(pack_id, 0, 0, hidden, None, seal=0, target_fingerprint=self.fingerprint)

    def release(self, pack_id: int) -> None:
        self.live.remove(pack_id)
        self.released.append(pack_id)


class ToyDrafter(nn.Module):
    """Mixes the context row before each anchor with the block's tokens; has matrices and vectors."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.fc = nn.Parameter((torch.randn(K * D, D, generator=generator) * 0.1).to(dtype))
        self.slot = nn.Parameter((torch.randn(B, D, generator=generator) * 0.1).to(dtype))
        self.norm = nn.Parameter(torch.ones(D, dtype=dtype))

    def make_masks(self, batch: BlockBatch) -> dict[str, Tensor]:
        return {"valid": batch.anchor_valid_N}

    def forward(self, *, hidden_TKD: Tensor, batch: BlockBatch, embedding_VD: Tensor, masks: Mapping[str, Tensor]) -> Tensor:
        assert masks["valid"].equal(batch.anchor_valid_N), "masks of another batch"
        context_ND = hidden_TKD[batch.anchors_N - 1].flatten(1).to(self.fc.dtype) @ self.fc
        tokens_NBD = embedding_VD[batch.block_token_ids_NB].to(self.fc.dtype)
        return torch.tanh(context_ND[:, None] + tokens_NBD + self.slot) * self.norm


@dataclass(frozen=True)
class ToyEnds:
    embedding_VD: Tensor
    head_VD: Tensor


@dataclass(frozen=True)
class ToySums:
    loss_sum: Tensor
    weight_sum: Tensor
    hits_per_slot: Tensor
    supervised_per_slot: Tensor
    accepted_sum: Tensor
    anchors: Tensor


def toy_ends() -> ToyEnds:
    generator = torch.Generator().manual_seed(5)
    return ToyEnds(torch.randn(V, D, generator=generator), torch.randn(V, D, generator=generator))


def toy_batch(pack: Pack, use: Use) -> BlockBatch:
    anchors = use.anchors.astype(np.int64)
    rows = anchors[:, None] + np.arange(B)
    supervised = np.repeat(use.anchor_valid[:, None], B, axis=1)
    supervised[:, 0] = False
    tokens = np.zeros((N, B), dtype=np.int64)
    tokens[:, 0] = pack.token_ids[anchors]
    flat = np.flatnonzero(supervised)
    return BlockBatch(
        pack_id=use.pack_id,
        use_number=use.use_number,
        step=use.step,
        context_positions_T=torch.from_numpy(pack.position_ids),
        context_document_T=torch.from_numpy(pack.document_of_token()),
        anchors_N=torch.from_numpy(anchors),
        anchor_start_N=torch.zeros(N, dtype=torch.int64),
        anchor_valid_N=torch.from_numpy(use.anchor_valid),
        block_token_ids_NB=torch.from_numpy(tokens),
        positions_NB=torch.from_numpy(rows),
        labels_NB=torch.from_numpy(np.where(supervised, pack.token_ids[rows], 0).astype(np.int64)),
        supervised_NB=torch.from_numpy(supervised),
        rows_M=torch.from_numpy(flat),
        num_rows=len(flat),
    )


def toy_loss(*, hidden_NBD: Tensor, head_VD: Tensor, batch: BlockBatch) -> ToySums:
    logits = hidden_NBD.float() @ head_VD.T
    ce = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_NB.flatten(), reduction="none").view(N, B)
    ce = torch.where(batch.supervised_NB, ce, 0.0)
    hits = (logits.argmax(-1) == batch.labels_NB) & batch.supervised_NB
    return ToySums(
        loss_sum=ce.sum(),
        weight_sum=batch.supervised_NB.sum(),
        hits_per_slot=hits.sum(0),
        supervised_per_slot=batch.supervised_NB.sum(0),
        accepted_sum=hits[:, 1:].long().cumprod(1).sum(),
        anchors=batch.anchor_valid_N.sum(),
    )


class Recorder(Hook):
    """Keeps the records that became readable, and every call in order."""

    def __init__(self) -> None:
        self.records = []
        self.calls: list[tuple] = []

    def on_start(self, step):
        self.calls.append(("start", step))

    def before_step(self, step):
        self.calls.append(("before", step))

    def after_step(self, step, records):
        self.calls.append(("after", step, [record.step for record in records]))
        self.records += records

    def on_checkpoint(self, step):
        self.calls.append(("checkpoint", step))

    def on_end(self, step, status):
        self.calls.append(("end", step, status))


SECTION = OptimizerSection(lr=1e-2, warmup_ratio=0.2, weight_decay=0.01, max_bad_steps=3)


@dataclass
class ToyRun:
    trainer: Trainer
    drafter: ToyDrafter
    source: ToySource
    recorder: Recorder
    account: Account

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.drafter.named_parameters()}


def _prepare(planner: ToyPlanner, share: ColumnShare) -> Callable[[int], PreparedStep]:
    return lambda index: prepare_step(
        planner=planner,
        index=index,
        columns=share.columns(planner.num_columns),
        make_batch=toy_batch,
        denominator=lambda step: float(step.supervised_per_slot.sum()),
    )


def make_run(
    *,
    num_steps: int,
    num_columns: int = 2,
    share: ColumnShare | None = None,
    group: RankGroup | None = None,
    folder: Path | None = None,
    resume: Path | None = None,
    every: int = 1000,
    keep: int = 3,
    dtype: torch.dtype = torch.float32,
    section: OptimizerSection = SECTION,
    source: ToySource | None = None,
    planner: ToyPlanner | None = None,
    loss: Callable = toy_loss,
    acceptance_at: Callable[[int], float | None] = lambda step: None,
    extra_hooks: tuple[Hook, ...] = (),
    weights: Mapping[str, Tensor] | None = None,
) -> ToyRun:
    """Everything wired as `build_trainer` does, with the toys in place of the real parts."""
    share, source = share or ColumnShare(rank=0, ranks=1), source or ToySource()
    planner, drafter = planner or ToyPlanner(num_columns=num_columns), ToyDrafter(dtype=dtype)
    optimizer = FlatAdamW(drafter, section=section, num_extra=StepTally.size(B))
    counters, start_step = Counters(), 0
    if resume is not None:
        checkpoint = read_checkpoint(resume, identity=IDENTITY)
        optimizer.load_state(checkpoint.state)
        counters, start_step = Counters(**checkpoint.counters), checkpoint.cursor.step
    if weights is not None:
        optimizer.load_weights(weights)
    recorder, account = Recorder(), Account("drafter-0")
    guard = GuardHook(guard=DivergenceGuard(max_bad_steps=section.max_bad_steps), counters=counters)
    trainer = Trainer(
        prepare=_prepare(planner, share),
        num_steps=num_steps,
        start_step=start_step,
        plan_digest=IDENTITY.plan_digest,
        block_size=B,
        source=source,
        column_pass=ColumnPass(
            drafter=drafter,
            ends=toy_ends(),
            loss=loss,
            noise=None,
            target_fingerprint=FINGERPRINT,
            device=torch.device("cpu"),
            account=account,
        ),
        optimizer=optimizer,
        section=section,
        checkpoint_every_steps=every,
        saving=None
        if folder is None
        else Saving(writer=CheckpointWriter(folder=folder, identity=IDENTITY, keep=keep), acceptance_at=acceptance_at),
        group=None if group is None else GradientSum(drafter, optimizer=optimizer, group=group),
        hooks=(recorder, guard, *extra_hooks),
        counters=counters,
        account=account,
    )
    return ToyRun(trainer, drafter, source, recorder, account)
