"""A run built from a recipe in memory: the real plan, blocks, drafter and objective; hidden states are made up by token id."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch

from slipstream.config.drafter_shape import DrafterShape
from slipstream.config.recipe import Recipe
from slipstream.drafter import build_drafter
from slipstream.observe import Account, RunFacts, open_metric_log
from slipstream.plan import CorpusIndex, Planner, make_schedule
from slipstream.records import Document, HiddenPack
from slipstream.trainer import ColumnShare, MainRank, RunParts, build_trainer, latest
from slipstream.trainer.build import Gpu
from slipstream.trainer.worth import GpuWork

K, D, V, MASK = 2, 32, 64, 63
SHAPE = DrafterShape(
    num_layers=2,
    block_size=4,
    mask_token_id=MASK,
    tap_layers=(0, 2),
    hidden_size=D,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=V,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=256,
    layer_types=("full", "full"),
    sliding_window=None,
    num_target_layers=4,
    initializer_range=0.02,
)

GPU_SHAPE = dataclasses.replace(SHAPE, hidden_size=64, intermediate_size=128, head_dim=16)
"""The same with heads that kernels of a GPU take."""


def make_recipe(**sections: dict) -> Recipe:
    base = {
        "name": "built",
        "target": {"model": "made-up", "tap_layers": [0, 2], "dtype": "float32"},
        "corpus": {"path": "memory"},
        "plan": {"pack_tokens": 128, "pack_anchors": 32, "packs_per_step": 2, "epochs": 4, "replays": 1},
        "drafter": {"num_layers": 2, "block_size": 4, "mask_token_id": MASK, "dtype": "float32"},
        "objective": {"chunk_rows": 64},
        "optimizer": {"lr": 3e-3},
        "validation": {"every_steps": 6},
        "checkpoint": {"every_steps": 4, "keep": 2},
        "observe": {"sinks": ["jsonl"]},
    }
    return Recipe.model_validate({**base, **{key: {**base.get(key, {}), **value} for key, value in sections.items()}})


def document(number: int) -> Document:
    """Counts upwards from its number: what comes next follows from the last token."""
    length = 30 + number % 9
    tokens = (1 + (number + np.arange(length)) % 50).astype(np.int32)
    return Document(document_id=number, token_ids=tokens, loss_mask=np.arange(length) >= 5)


NUM_DOCUMENTS = 40


class Source:
    """Hidden states by token id, in the type of slots. On a device they lie there from the first use on, as slots would."""

    def __init__(self, planner: Planner, *, shape: DrafterShape, device: str, dtype: torch.dtype) -> None:
        self.planner = planner
        self.device = device
        self.num_released = 0
        table = torch.randn(V, shape.num_taps, shape.hidden_size, generator=torch.Generator().manual_seed(3))
        self.table = table.to(dtype)
        self.slots: dict[int, torch.Tensor] = {}

    def take(self, pack_id: int) -> HiddenPack:
        if pack_id not in self.slots:
            tokens = torch.from_numpy(self.planner.pack(pack_id).token_ids.astype(np.int64))
            self.slots[pack_id] = self.table[tokens].to(self.device)
        return HiddenPack(pack_id, 0, 0, self.slots[pack_id], None, seal=0, target_fingerprint="made-up")

    def release(self, pack_id: int) -> None:
        self.num_released += 1

    def preload(self, num_packs: int) -> None:
        for pack_id in range(num_packs):
            self.take(pack_id)


class Ends:
    def __init__(self, *, shape: DrafterShape, dtype: str, device: str, embedding: str) -> None:
        def ends(seed: int, place: str) -> torch.Tensor:
            values = torch.randn(V, shape.hidden_size, generator=torch.Generator().manual_seed(seed))
            return values.to(device=place, dtype=getattr(torch, dtype))

        self.embedding_VD, self.head_VD = ends(4, embedding), ends(5, device)


def index_of(documents: list[Document]) -> CorpusIndex:
    return CorpusIndex(
        num_tokens=np.array([len(d.token_ids) for d in documents], dtype=np.int32),
        num_anchors=np.array([(d.loss_mask[:-1] & d.loss_mask[1:]).sum() for d in documents], dtype=np.int32),
        fingerprint="memory",
    )


class Built:
    """One start of a run in a folder."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        *,
        resume: bool = False,
        shape: DrafterShape = SHAPE,
        device: str = "cpu",
        attention: str = "sdpa",
        gpu: Gpu | None = None,
        work: GpuWork | None = None,
        account: Account | None = None,
        embedding: str | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        documents = [document(number) for number in range(NUM_DOCUMENTS)]
        self.schedule = make_schedule(index=index_of(documents), plan=recipe.plan, block_size=shape.block_size)
        self.planner = planner = Planner(schedule=self.schedule, document=documents.__getitem__)
        slots = {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.slot_dtype]
        self.source = Source(planner, shape=shape, device=device, dtype=slots)
        dtype = recipe.drafter.dtype
        self.drafter = build_drafter(shape=shape, dtype=dtype, device=device, seed=recipe.plan.seed, attention=attention)
        self.metrics, self.checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
        facts = RunFacts(
            name="built",
            num_steps=self.schedule.num_steps,
            metrics_path=self.metrics,
            console_every_steps=1,
            folder=folder,
            recipe={},
        )
        self.log = open_metric_log(recipe.observe.sinks, facts=facts)
        self.validated: list[int] = []
        self.ends = Ends(shape=shape, dtype=dtype, device=device, embedding=embedding or device)
        parts = RunParts(
            recipe=recipe,
            shape=shape,
            schedule=self.schedule,
            planner=planner,
            source=self.source,
            drafter=self.drafter,
            ends=self.ends,
            target_fingerprint="made-up",
            share=ColumnShare(rank=0, ranks=1),
            group=None,
            account=account or Account("drafter-0"),
            device=torch.device(device),
            work=work,
            validate=self.validate,
        )
        main = MainRank(log=self.log, checkpoints=self.checkpoints)
        self.trainer = build_trainer(parts=parts, main=main, resume=latest(self.checkpoints) if resume else None, gpu=gpu)

    def validate(self, step: int) -> dict[str, object]:
        self.validated.append(step)
        return {"acceptance_length": 1.0 + step / 100, "prompts": 3}

    def fit(self, *, steps: int | None = None):
        calls = iter(range(10_000))
        with self.log:
            return self.trainer.fit(stop=lambda: steps is not None and next(calls) >= steps - 1)

    def lines(self, kind: str) -> list[dict]:
        return [line for line in map(json.loads, self.metrics.read_text().splitlines()) if line["kind"] == kind]
