"""The drafter's side of both placements: builds the trainer from the run folder, trains, and measures on the way."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.config import DrafterShape, Recipe, TargetInfo
from slipstream.device.sender import BatchSender
from slipstream.drafter import DFlashDrafter
from slipstream.evaluate.acceptance import simulate_pack
from slipstream.evaluate.summary import count_path, num_counts, summarise_counts
from slipstream.export.warm_start import read_warm_start
from slipstream.launch.borrowed import borrowed_ends
from slipstream.launch.child import Control
from slipstream.launch.new_drafter import NewDrafter
from slipstream.launch.planning import RunPlan, slot_layout
from slipstream.launch.queues import QueueSampler
from slipstream.launch.rejections import Rejections
from slipstream.launch.stages import DryWatch, dry_watch, time_stages
from slipstream.launch.work import gpu_work
from slipstream.observe import Account, MetricLog
from slipstream.records import HiddenPack, Int64Array
from slipstream.runfolder import RunFolder
from slipstream.target.ends import FrozenEnds
from slipstream.target.fingerprint import fingerprint_target
from slipstream.trainer import ColumnShare, FitResult, MainRank, RankGroup, RunParts, build_trainer, latest
from slipstream.transport.ends import SourceStats
from slipstream.transport.ledger import QueueDepth

Line = Mapping[str, object]

PEER_SECONDS = 3600.0
"""Longest wait of a drafter rank for another, which may wait for its disk meanwhile, or measure more. A rank that dies is
noticed by the supervisor, at once."""


class Source(Protocol):
    """The consumer end of a transport, as `SharedSource` and `InlineTransport` offer it."""

    def take(self, pack_id: int) -> HiddenPack:
        """The hidden states of a pack; waits for them."""
        ...

    def release(self, pack_id: int) -> None:
        """The pack's last use is over."""
        ...

    def stats(self) -> SourceStats:
        """What it counted so far."""
        ...

    def depths(self) -> Mapping[int, QueueDepth]:
        """The queue between target and drafter by rank, now; empty where only the broker knows it."""
        ...

    def close(self) -> None:
        """Leave in order."""
        ...


class OnDevice:
    """A source whose packs lie on the drafter's device, wherever their slots are.

    What the thread waits for `inside` a take is no other worker, where this process makes the packs itself. With a `watch` it
    waits for its own GPU first, until that has run dry. `rejections` looks behind each take, one that fails too.
    """

    def __init__(
        self,
        source: Source,
        *,
        device: torch.device,
        account: Account | None = None,
        inside: str = "wait_input",
        watch: DryWatch | None = None,
        rejections: Rejections | None = None,
    ) -> None:
        self._source = source
        self._device = device
        self._rejections = rejections
        self._account, self._inside, self._watch = account or Account("source"), inside, watch

    def take(self, pack_id: int) -> HiddenPack:
        """The pack, where the drafter computes: a copy made here would be one that the loop waits for."""
        with self._account.state("wait_gpu" if self._watch else self._inside, pack=pack_id) as claim:
            if self._watch is not None:
                self._watch.until_dry(claim, self._inside)
            try:
                taken = self._source.take(pack_id)
            finally:
                if self._rejections is not None:
                    self._rejections.look()
        found = taken.hidden_TKD.device.type
        assert found == self._device.type, f"pack {pack_id} came on {found}, the drafter is on {self._device}"
        return taken

    def release(self, pack_id: int) -> None:
        """The pack's last use is over."""
        self._source.release(pack_id)


class ReportSink:
    """A sink of metrics that sends each line to the supervisor, whose sinks write it."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def write(self, line: Line) -> None:
        """Send one line."""
        self._control.report("record", dict(line))

    def close(self) -> None:
        """Nothing is held."""


class Validation:
    """Exact greedy acceptance length over the answered prompts, whose hidden states stay in kept slots.

    Each rank of `group` measures the packs that the plan gives it, with its own copy of the weights, which are equal on all.
    What it counted by answer is summed over the ranks, so that the figures are the same however many there are.
    """

    def __init__(
        self,
        *,
        plan: RunPlan,
        source: OnDevice,
        drafter: DFlashDrafter,
        ends: FrozenEnds,
        shape: DrafterShape,
        rank: int,
        group: RankGroup | None,
    ) -> None:
        self._source, self._drafter, self._ends, self._shape = source, drafter, ends, shape
        self._packs, self._group = plan.measured_by(rank), group
        self._send = BatchSender(drafter.device)
        documents = sorted(int(number) for item in plan.validation for number in item.pack.document_ids)
        self._row_of = {number: row for row, number in enumerate(documents)}

    def measure(self, step: int) -> dict[str, object]:
        """Metrics by name: both means, acceptance by slot, the histogram, and how many answers took part.

        A reduction over the ranks: all call it at the same steps, those that have no pack to measure too. Raises `PeerDied`.
        """
        began = time.monotonic()
        summary = summarise_counts(self._joined(self._count()), block_size=self._shape.block_size)
        return {
            "acceptance_length": summary.tau_steps,
            "acceptance_length_by_request": summary.tau_requests,
            "slot_acceptance": list(summary.slot_acceptance),
            "histogram": list(summary.histogram),
            "answers": summary.requests,
            "seconds": time.monotonic() - began,
        }

    def _count(self) -> Int64Array:
        """This rank's answers, int64 `[A, 1 + C]` in the order of the prompts: 1 and the counts of the path; others are 0."""
        counts = np.zeros((len(self._row_of), 1 + num_counts(self._shape.block_size)), dtype=np.int64)
        for item in self._packs:
            taken = self._source.take(item.pack.pack_id)
            found = simulate_pack(
                drafter=self._drafter,
                ends=self._ends,
                shape=self._shape,
                hidden_TKD=taken.hidden_TKD,
                pack=item.pack,
                uses=item.uses,
                max_lengths=item.max_lengths,
                send=self._send,
            )
            for document in found:
                row = counts[self._row_of[document.document_id]]
                row[0], row[1:] = 1, count_path(document.path, block_size=self._shape.block_size)
        return counts

    def _joined(self, counts: Int64Array) -> Int64Array:
        """The counts of all ranks, int64 `[A, C]`."""
        if self._group is not None:
            summed = torch.from_numpy(counts).to(self._drafter.device)
            self._group.wait(self._group.start_sum(summed))
            counts = summed.cpu().numpy()
        assert (counts[:, 0] == 1).all(), f"answers are measured {counts[:, 0].tolist()} times"
        return counts[:, 1:]


def train_drafter(
    *,
    job: Mapping[str, Any],
    control: Control,
    account: Account,
    recipe: Recipe,
    info: TargetInfo,
    shape: DrafterShape,
    plan: RunPlan,
    source: Source,
    new: NewDrafter,
    target_embedding_VD: Tensor | None = None,
) -> dict[str, Any]:
    """Train one rank's share to the end of the plan, or to the supervisor's wish; returns what the run's result needs.

    `target_embedding_VD` is that of a target in this process.
    """
    rank, folder = int(job["rank"]), RunFolder(Path(job["folder"]))
    share = ColumnShare(rank=rank, ranks=plan.ranks)
    drafter = new.drafter
    ends = borrowed_ends(info=info, dtype=recipe.drafter.dtype, device=job["device"], target_embedding_VD=target_embedding_VD)
    with ExitStack() as stack:
        stack.callback(source.close)
        placed = _place(source, job=job, control=control, account=account, stack=stack)
        group = _join(share=share, job=job, recipe=recipe, stack=stack)
        validation = Validation(plan=plan, source=placed, drafter=drafter, ends=ends, shape=shape, rank=rank, group=group)
        parts = RunParts(
            recipe=recipe,
            shape=shape,
            schedule=plan.schedule,
            planner=plan.planner,
            source=placed,
            drafter=drafter,
            ends=ends,
            target_fingerprint=fingerprint_target(info, dtype=recipe.target.dtype),
            share=share,
            group=group,
            account=account,
            device=torch.device(job["device"]),
            work=gpu_work(info=info, shape=shape, device=job["device"], makes_packs=job["role"] == "colocated"),
            validate=validation.measure if plan.validation else None,
        )
        main = _main_rank(rank=rank, control=control, folder=folder, stack=stack)
        new.ready()
        trainer = build_trainer(parts=parts, main=main, resume=Path(job["checkpoint"]) if job["checkpoint"] else None)
        if recipe.drafter.warm_start is not None and trainer.start_step == 0:
            trainer.optimizer.load_weights(read_warm_start(Path(recipe.drafter.warm_start), shape=shape))
        time_stages(account, device=job["device"])
        control.report("ready", {"parameters": shape.num_parameters})
        account.rest()
        if job["role"] == "colocated":
            slot_bytes = slot_layout(recipe=recipe, shape=shape, info=info).nbytes
            stack.enter_context(_sampled_queue(source, control=control, account=account, plan=plan, slot_bytes=slot_bytes))
        result = trainer.fit(stop=control.stopping)
    return _summary(result, folder=folder)


def _summary(result: FitResult, *, folder: RunFolder) -> dict[str, Any]:
    newest = latest(folder.checkpoints)
    return {
        "step": result.step,
        "status": result.status,
        "warm_up_seconds": result.seconds.warm_up,
        "train_seconds": result.seconds.train,
        "validate_seconds": result.seconds.validate,
        "checkpoint": str(newest) if newest else None,
    }


def _sampled_queue(source: Source, *, control: Control, account: Account, plan: RunPlan, slot_bytes: int) -> QueueSampler:
    return QueueSampler(
        depths=source.depths,
        trained=lambda: account.step - 1,
        schedule=plan.schedule,
        start_step=plan.start_step,
        slot_bytes=slot_bytes,
        put=lambda lines: control.report("queues", lines),
    )


def _place(source: Source, *, job: Mapping[str, Any], control: Control, account: Account, stack: ExitStack) -> OnDevice:
    """The source, with its takes charged to what they wait for.

    A process that makes its packs itself waits for its own GPU alone, or seals them on the CPU.
    """
    device = torch.device(job["device"])
    rejections = Rejections(
        worker=job["name"], stats=source.stats, step=lambda: account.step, put=lambda line: control.report("record", line)
    )
    if job["role"] == "colocated":
        inside = "publish" if job["device"] == "cpu" else "wait_gpu"
        return OnDevice(source, device=device, account=account, inside=inside, rejections=rejections)
    watch = dry_watch(device=job["device"])
    if watch is not None:
        stack.callback(watch.close)
    return OnDevice(source, device=device, account=account, watch=watch, rejections=rejections)


def _join(*, share: ColumnShare, job: Mapping[str, Any], recipe: Recipe, stack: ExitStack) -> RankGroup | None:
    if share.ranks == 1:
        return None
    group = RankGroup.join(
        share=share,
        store=Path(job["rendezvous"]),
        timeout_seconds=max(recipe.placement.ready_seconds, PEER_SECONDS),
        backend="nccl" if job["device"] == "cuda" else "gloo",
    )
    return stack.enter_context(group)


def _main_rank(*, rank: int, control: Control, folder: RunFolder, stack: ExitStack) -> MainRank | None:
    if rank != 0:
        return None
    log = stack.enter_context(MetricLog({"supervisor": ReportSink(control)}))
    return MainRank(log=log, checkpoints=folder.checkpoints)
