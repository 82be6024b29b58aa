"""Stage costs that were measured on this machine, kept beside the runs under what they depend on. No torch in here."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream.config import DrafterShape, Recipe, TargetInfo
from slipstream.corpus.store import CorpusStore
from slipstream.device.gpus import GpuFacts
from slipstream.device.kind import DeviceKind
from slipstream.device.threads import ThreadShare, share_threads
from slipstream.errors import UsageError
from slipstream.plan.bench_costs import PartialCosts, RunShape, costs_of_bench, join_costs
from slipstream.plan.known_gpus import KnownGpu, PackShape, estimate_costs, find_gpu
from slipstream.plan.throughput import StageCosts
from slipstream.plan.weights import count_target_weights
from slipstream.report.measured import measure
from slipstream.report.reading import read_run

FOLDER = "stage-costs"
"""Beside the run folders."""
USUAL_FILL = 0.99
"""Of a pack, before its schedule is known."""
PLAN_KEYS = ("pack_tokens", "pack_anchors", "max_anchors_per_document")


@dataclass(frozen=True, slots=True)
class Subject:
    """What costs are of: a recipe's stages on one kind of device. `gpu` is the driver's name; none on a CPU."""

    recipe: Recipe
    info: TargetInfo
    shape: DrafterShape
    device: DeviceKind
    gpu: str | None
    threads: ThreadShare | None

    @classmethod
    def of(
        cls, *, recipe: Recipe, info: TargetInfo, shape: DrafterShape, device: DeviceKind, gpus: Sequence[GpuFacts]
    ) -> Subject:
        """On the first of the GPUs, or on cores as the recipe's own placement shares them out."""
        section = recipe.placement
        split = section.mode != "colocated"
        threads = share_threads(
            target_workers=section.target_workers if split else 0,
            drafter_ranks=section.drafter_ranks,
            target_threads=section.target_threads,
            drafter_threads=section.drafter_threads,
        )
        return cls(
            recipe=recipe,
            info=info,
            shape=shape,
            device=device,
            gpu=gpus[0].name if gpus else None,
            threads=threads if device == "cpu" else None,
        )

    @property
    def path(self) -> Path:
        """Where costs of this subject are kept: by a digest of everything that they depend on."""
        digest = hashlib.sha256(json.dumps(self.facts(), sort_keys=True, default=str).encode()).hexdigest()
        return Path(self.recipe.runs) / FOLDER / f"{digest[:16]}.json"

    def facts(self) -> dict[str, Any]:
        """What costs depend on: models, sizes of packs, device, threads, and the versions that compute."""
        recipe, info = self.recipe, asdict(self.info)
        return {
            "target": recipe.target.model_dump(mode="json", exclude={"model"}),
            "info": {name: value for name, value in info.items() if isinstance(value, int | float | str | tuple)},
            "drafter": {**asdict(self.shape), "dtype": recipe.drafter.dtype, "attention": recipe.drafter.attention},
            "objective": recipe.objective.model_dump(mode="json"),
            "slots": recipe.placement.slot_dtype,
            "plan": {key: getattr(recipe.plan, key) for key in PLAN_KEYS},
            "device": self.gpu or _cpu_name(),
            "threads": None if self.threads is None else asdict(self.threads),
            "versions": {"slipstream": __version__} | {name: metadata.version(name) for name in ("torch", "transformers")},
        }

    def run_shape(self, pack: PackShape) -> RunShape:
        """For costs that were measured on other packs."""
        return RunShape(
            shape=self.shape,
            weights=count_target_weights(self.info),
            pack=pack,
            pack_tokens=self.recipe.plan.pack_tokens,
        )


def usual_pack(recipe: Recipe) -> PackShape:
    """An average pack of a recipe's corpus before it is planned: nearly full, of documents as they come."""
    lengths = CorpusStore.open(Path(recipe.corpus.path)).num_tokens.astype(float)
    tokens = USUAL_FILL * recipe.plan.pack_tokens
    return PackShape(
        tokens=tokens,
        squared_tokens=tokens * float((lengths * lengths).sum()) / max(1.0, float(lengths.sum())),
        anchors=recipe.plan.pack_anchors,
    )


def stored_costs(subject: Subject, *, pack: PackShape) -> StageCosts | None:
    """Costs that were probed for exactly this subject, for packs of so many tokens; none where there are none."""
    if not subject.path.is_file():
        return None
    return _with_tokens(_parse_costs(subject.path, json.loads(subject.path.read_text())["costs"]), pack=pack)


def store_costs(subject: Subject, costs: StageCosts) -> Path:
    """Keep probed costs, whole or not at all."""
    subject.path.parent.mkdir(parents=True, exist_ok=True)
    temporary = subject.path.with_suffix(".part")
    temporary.write_text(json.dumps({"costs": costs.as_dict(), "of": subject.facts()}, indent=1, default=str))
    os.replace(temporary, subject.path)
    return subject.path


def table_costs(subject: Subject, *, gpu: KnownGpu, pack: PackShape) -> StageCosts:
    """Costs on a GPU of the table."""
    return estimate_costs(
        gpu=gpu,
        info=subject.info,
        shape=subject.shape,
        weights=count_target_weights(subject.info),
        pack=pack,
        pack_tokens=subject.recipe.plan.pack_tokens,
        replays=subject.recipe.plan.replays,
        cuda_graphs=subject.recipe.placement.cuda_graphs,
        target_recordable="linear_attention" not in subject.info.layer_types,
    )


def known_costs(subject: Subject, *, pack: PackShape | None = None) -> StageCosts | None:
    """Probed costs, else those of the table on a GPU that it knows; none on a CPU or GPU that nobody measured.

    Without a `pack` they are of an average one of the corpus, before it is planned.
    """
    gpu = find_gpu(subject.gpu) if subject.gpu else None
    if gpu is None and not subject.path.is_file():
        return None
    pack = pack or usual_pack(subject.recipe)
    stored = stored_costs(subject, pack=pack)
    return table_costs(subject, gpu=gpu, pack=pack) if stored is None and gpu is not None else stored


def given_costs(files: Sequence[Path], *, subject: Subject, pack: PackShape) -> StageCosts:
    """Costs from files of benches or of a probe, or from a run folder. Raises `UsageError` naming a file and what it lacks."""
    run = subject.run_shape(pack)
    parts = []
    for file in files:
        if file.is_dir():
            return _with_tokens(_run_costs(file), pack=pack)
        found = _read(file)
        if "costs" in found or "target_seconds_per_pack" in found:
            return _with_tokens(_parse_costs(file, found.get("costs", found)), pack=pack)
        try:
            part = costs_of_bench(found, run=run)
        except (KeyError, TypeError, ValueError) as error:
            rule = str(error) if isinstance(error, ValueError) else f"lacks {error}"
            raise UsageError(key="--costs", value=str(file), rule=rule) from error
        if part == PartialCosts():
            raise UsageError(
                key="--costs",
                value=str(file),
                rule="holds no stage costs",
                hint="`slipstream bench pipeline|target|drafter --json`, a file of --probe, or a run folder",
            )
        parts.append(part)
    try:
        return join_costs(parts, run=run)
    except ValueError as error:
        raise UsageError(key="--costs", value=", ".join(map(str, files)), rule=str(error)) from error


def _run_costs(folder: Path) -> StageCosts:
    measured = measure(read_run(folder))
    if measured is None:
        raise UsageError(key="--costs", value=str(folder), rule="has too few steps to measure stage costs from")
    return measured.costs


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(key="--costs", value=str(file), rule=f"cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(key="--costs", value=str(file), rule="is no JSON object")
    return found


def _parse_costs(file: Path, found: Any) -> StageCosts:
    try:
        return StageCosts.from_dict(found)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(key="--costs", value=str(file), rule=f"lacks {error}") from error


def _with_tokens(costs: StageCosts, *, pack: PackShape) -> StageCosts:
    return StageCosts.from_dict({**costs.as_dict(), "tokens_per_pack": pack.tokens})


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine
