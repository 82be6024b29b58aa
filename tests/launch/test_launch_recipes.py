"""The placements of the recipes for large targets: as fast as the best that fits, by the table and by what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from slipstream.config import Recipe, TargetInfo, load_recipe, resolve_drafter
from slipstream.corpus.meta import CorpusMeta
from slipstream.corpus.store import write_store
from slipstream.device.gpus import GpuFacts
from slipstream.launch.bench.target import TARGETS, random_info
from slipstream.launch.forecast import Forecast, forecast, layout_of, place, workload
from slipstream.launch.stage_costs import Subject, known_costs
from slipstream.plan import CorpusIndex, Schedule, make_schedule, plan_memory
from slipstream.plan.bench_costs import costs_of_bench, join_costs
from slipstream.plan.known_gpus import PackShape, find_gpu
from slipstream.plan.throughput import Layout, StageCosts

RECIPES = Path(__file__).parents[2] / "recipes"
DOCUMENTS = 4800
"""Of the planned corpus: a run that is long enough for all slots to be in use."""
VALIDATION_SLOTS = 16
"""Of 128 prompts with answers of 256 tokens, 1,024 tokens each."""
MEASURED = {
    "shape": "qwen3.6-27b",
    "pipeline": {
        "figures": [{"target_milliseconds": 643.6, "drafter_milliseconds": 218.5, "ratio": 1.001}],
        "real_tokens": 8128, "pack_tokens": 8192, "anchors": 512, "layers": 62,
    },
}  # fmt: skip
"""`slipstream bench pipeline` on an H200 (LAB_LOG.md, "the engine's whole table at one commit")."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Document lengths of the plan, and a folder with a few such documents, from which a usual pack is told."""

    lengths: np.ndarray
    folder: Path

    def schedule(self, recipe: Recipe) -> Schedule:
        """The whole plan."""
        tokens = self.lengths.astype(np.int32)
        index = CorpusIndex(num_tokens=tokens, num_anchors=tokens - 6, fingerprint="stand-in")
        return make_schedule(index=index, plan=recipe.plan, block_size=recipe.drafter.block_size)


@pytest.fixture(scope="module", params=["alike", "mixed"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Documents of about 2,000 tokens, or of lognormal lengths with a median of 900."""
    rng = np.random.default_rng(0)
    alike, mixed = rng.integers(1980, 2049, DOCUMENTS), rng.lognormal(np.log(900), 0.7, 3 * DOCUMENTS)
    lengths = alike if request.param == "alike" else np.clip(mixed, 64, 4096).astype(int)
    folder = tmp_path_factory.mktemp("corpus") / "store"
    documents = [{"token_ids": [9] * n, "loss_mask": [False] * 5 + [True] * (n - 5)} for n in lengths[:200].tolist()]
    write_store(folder, documents, CorpusMeta(target="none", tokenizer_fingerprint="none", template_fingerprint="none"))
    return Corpus(lengths, folder)


def target_of(name: str) -> TargetInfo:
    return random_info(TARGETS[name]())


def gpus_of(name: str, count: int) -> tuple[GpuFacts, ...]:
    known = find_gpu(name)
    assert known is not None
    return tuple(GpuFacts(index, known.name, int(known.memory_gb * 1e9), None) for index in range(count))


def judged(
    name: str, corpus: Corpus, *, gpu: str, count: int, measured: bool = False, overrides: tuple[str, ...] = ()
) -> tuple[Layout, Forecast]:
    """The layout that a recipe takes on so many GPUs, which must fit them and the host, and what all that fit would do."""
    given = load_recipe(RECIPES / f"{name}.toml", overrides=(f"corpus.path={corpus.folder}", *overrides))
    info, gpus = target_of(name), gpus_of(gpu, count)
    shape = resolve_drafter(recipe=given, info=info)
    recipe, placement, _ = place(recipe=given, info=info, shape=shape, device="cuda", num_devices=count, gpus=gpus)
    schedule, memory_bytes = corpus.schedule(recipe), gpus[0].memory_bytes
    memory = plan_memory(
        recipe=recipe, info=info, shape=shape, schedule_slots_per_column=schedule.slots_per_column,
        validation_slots=VALIDATION_SLOTS, device="cuda", gpu_memory_bytes=memory_bytes,
    )  # fmt: skip
    memory.check_gpus(placement=placement, gpu_memory_bytes=[memory_bytes] * count)
    memory.check_host_slots(placement.mode)
    subject = Subject.of(recipe=given, info=info, shape=shape, device="cuda", gpus=gpus)
    pack = PackShape.of(schedule, num_tokens=corpus.lengths.astype(np.int32))
    costs = measured_costs(subject, pack=pack) if measured else known_costs(subject, pack=pack)
    assert costs is not None
    layout, work = layout_of(placement), workload(recipe, num_steps=schedule.num_steps)
    return layout, forecast(costs=costs, work=work, devices=count, memory=memory, gpu_memory_bytes=memory_bytes, also=[layout])


def measured_costs(subject: Subject, *, pack: PackShape) -> StageCosts:
    """Of the bench, scaled to packs of this recipe."""
    run = subject.run_shape(pack)
    return join_costs([costs_of_bench(MEASURED, run=run)], run=run)


def of_the_best(layout: Layout, found: Forecast) -> float:
    """The predicted rate of a layout over that of the best one."""
    ours = found.of(layout)
    assert ours is not None
    assert found.best is not None
    return ours.trained_tokens_per_second / found.best.trained_tokens_per_second


@pytest.mark.parametrize("measured", [False, True], ids=["table", "bench"])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_27b_recipe_takes_the_best_of_h200s(corpus: Corpus, count: int, measured: bool) -> None:
    layout, found = judged("qwen3.6-27b", corpus, gpu="H200", count=count, measured=measured)
    assert layout.devices == count
    assert of_the_best(layout, found) > 0.97


def test_what_the_27b_recipe_says_of_eight_h200(corpus: Corpus) -> None:
    """Also that this test would see a placement that is out of balance: 5 + 3 is what the recipe named before."""
    layout, found = judged("qwen3.6-27b", corpus, gpu="H200", count=8)
    assert str(layout) == "colocated on 8"
    rate = {str(each.layout): each.trained_tokens_per_second for each in found.predictions}
    assert rate["colocated on 8"] == pytest.approx(61_000, rel=0.03)
    assert rate["2 + 6"] / rate["colocated on 8"] == pytest.approx(0.95, abs=0.01)
    named = ("placement.mode=split", "placement.target_workers=5", "placement.drafter_ranks=3")
    layout, found = judged("qwen3.6-27b", corpus, gpu="H200", count=8, overrides=named)
    assert str(layout) == "5 + 3"
    assert of_the_best(layout, found) < 0.55


@pytest.mark.parametrize("gpu", ["H100", "A100", "RTX PRO 6000"])
def test_the_27b_recipe_is_split_where_a_gpu_cannot_hold_both(corpus: Corpus, gpu: str) -> None:
    layout, found = judged("qwen3.6-27b", corpus, gpu=gpu, count=8)
    assert str(layout) == "2 + 6"
    assert of_the_best(layout, found) > 0.97
    assert "a colocated process needs 102" in next(each.reason for each in found.refused if each.layout.mode == "colocated")


@pytest.mark.parametrize("gpu", ["H200", "H100"])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_8b_recipe_takes_the_best_of_a_few_gpus(corpus: Corpus, gpu: str, count: int) -> None:
    layout, found = judged("qwen3-8b", corpus, gpu=gpu, count=count)
    assert str(layout) == f"colocated on {count}"
    assert of_the_best(layout, found) > 0.97


@pytest.mark.parametrize(
    ("gigabytes", "count", "overrides", "wanted"),
    [
        (180, 8, (), "colocated on 8"),
        (180, 1, (), "colocated on 1"),
        (80, 8, (), "4 + 4"),
        (80, 7, (), "4 + 3"),
        (80, 8, ("placement.drafter_ranks=6",), "2 + 6"),
        (180, 7, (), "4 + 3"),
        (None, 8, (), "1 + 1"),
    ],
)
def test_a_gpu_that_nobody_has_measured_is_used_all_the_same(
    gigabytes: int | None, count: int, overrides: tuple[str, ...], wanted: str
) -> None:
    """Colocated where both fit, in halves where not; seven ranks do not divide 24 packs. Of unknown size: one each."""
    recipe, info = load_recipe(RECIPES / "qwen3.6-27b.toml", overrides=overrides), target_of("qwen3.6-27b")
    size = None if gigabytes is None else gigabytes * 10**9
    gpus = tuple(GpuFacts(index, "NVIDIA X9000", size, None) for index in range(count))
    shape = resolve_drafter(recipe=recipe, info=info)
    changed, placement, why = place(recipe=recipe, info=info, shape=shape, device="cuda", num_devices=count, gpus=gpus)
    assert str(layout_of(placement)) == wanted
    assert len({process.gpu for process in placement.processes}) == min(count, len(placement.processes))
    if count > 1 and gigabytes:
        assert why is not None
        assert why.startswith(wanted)
        assert "--probe" in why
        assert changed.placement.drafter_ranks == layout_of(placement).drafters
