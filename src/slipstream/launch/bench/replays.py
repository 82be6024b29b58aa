"""What replays cost: acceptance length of drafters trained with and without them, at equal steps and equal anchors.

Every condition sees each document as often, with the same anchors from the same initial weights; conditions differ in how
many times the target ran, and in how many steps lie between two uses of a pack. Without replays each epoch is packed anew
and run through the target, with R replays an R-th of the epochs. All conditions of one seed are pairs of each other.

One GPU, or the CPU, for everything; `workers` processes share it. A run is taken when its turn comes, seed by seed, so that
what has been measured when it is stopped still is of pairs.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.config import Recipe, make_recipe
from slipstream.corpus.store import CorpusStore
from slipstream.device.limits import available_cores
from slipstream.errors import UsageError
from slipstream.launch.answers import Answer
from slipstream.launch.bench.paired import MAX_SEEDS, Difference, paired_difference
from slipstream.launch.bench.replays_run import Ground, Trained, train_in_child
from slipstream.launch.planning import corpus_index
from slipstream.launch.preflight import Preflight
from slipstream.launch.roles.answers import answer, ask
from slipstream.plan import make_schedule

BASELINE, EIGHT_BITS = "none", "float8 slots"
NEVER = 10**9
Say = Callable[[str], None]
Hear = Callable[["ReplayFigures"], None]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ReplayWork:
    """What is compared with training that never replays: `replays` uses a pack at each of `distances`, and eight-bit slots."""

    distances: tuple[int, ...] = (1, 5, 20, 50)
    replays: int = 2
    seeds: int = 3
    eight_bits: bool = False
    workers: int = 1


@dataclass(frozen=True, slots=True)
class ConditionFigures:
    """One condition over the seeds that have both it and the baseline.

    `distance` is what was asked for, `planned_distance` what the plan made of it. `acceptance_length` is the mean over seeds,
    on the target's own states; `rounded_acceptance_length` on rounded ones, for slots that round. `difference` is to the
    baseline.
    """

    name: str
    distance: int | None
    planned_distance: int | None
    steps: int
    anchors: int
    packs: int
    acceptance_length: float
    rounded_acceptance_length: float | None
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """All that has been measured so far: figures by condition, the baseline first, and every run."""

    work: ReplayWork
    conditions: tuple[ConditionFigures, ...]
    runs: tuple[Trained, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Condition:
    name: str
    keys: dict[str, Any]
    distance: int | None = None


def bench_replays(
    flight: Preflight,
    work: ReplayWork,
    *,
    say: Say = lambda line: None,
    hear: Hear = lambda figures: None,
    on_progress: Progress = lambda stage, done, of: None,
) -> ReplayFigures:
    """Train and measure every condition with every seed; `hear` is given what is known after each.

    Raises `UsageError` for work that cannot be compared, `PlanError` for a corpus too small for a distance.
    """
    conditions = make_conditions(flight.recipe, work)
    recipes = equal_recipes(flight.recipe, conditions=conditions, seeds=work.seeds)
    asked = ask(recipe=flight.recipe, info=flight.info)
    say(f"{len(asked.prompts)} prompts" + ("" if asked.kept.is_file() else ", answered by the target"))
    answers = answer(
        asked, recipe=flight.recipe, info=flight.info, device=flight.device, on_progress=partial(on_progress, "answers")
    )
    done: list[Trained] = []
    on_progress("runs", 0, len(recipes))
    with _trainer(flight, answers=answers, work=work) as results:
        for trained in results(recipes):
            done.append(trained)
            figures = make_figures(work, conditions=conditions, runs=done)
            say(_told(trained, done))
            hear(figures)
            on_progress("runs", len(done), len(recipes))
    return make_figures(work, conditions=conditions, runs=done)


def make_conditions(recipe: Recipe, work: ReplayWork) -> list[_Condition]:
    """The baseline, then what is compared with it. Raises `UsageError`."""
    uses = recipe.plan.epochs * recipe.plan.replays
    if recipe.validation.prompts is None:
        raise UsageError(key="validation.prompts", value=None, rule="is needed: acceptance is measured on held-out prompts")
    if not 2 <= work.replays <= uses or uses % work.replays:
        raise UsageError(
            key="--replays",
            value=work.replays,
            rule=f"must be 2 or more and divide the uses of a document, {uses} (plan.epochs x plan.replays)",
        )
    if not 1 <= work.seeds <= MAX_SEEDS:
        raise UsageError(key="--seeds", value=work.seeds, rule=f"must be 1 to {MAX_SEEDS}")
    if list(work.distances) != sorted(set(work.distances)) or min(work.distances, default=1) < 1:
        raise UsageError(key="--distances", value=list(work.distances), rule="must ascend from 1 or more, without repeats")
    plain = {"plan": {"epochs": uses, "replays": 1}}
    replayed = {"epochs": uses // work.replays, "replays": work.replays, "allow_lossy_replays": True}
    found = [_Condition(BASELINE, plain)]
    if work.eight_bits:
        found.append(_Condition(EIGHT_BITS, {**plain, "placement": {"slot_dtype": "float8_e4m3"}}))
    return found + [
        _Condition(f"distance {distance}", {"plan": {**replayed, "replay_distance": distance}}, distance)
        for distance in work.distances
    ]


def equal_recipes(recipe: Recipe, *, conditions: Sequence[_Condition], seeds: int) -> list[tuple[str, Recipe]]:
    """Names and recipes of all runs, seed by seed, each cut to the steps that all of its seed's schedules have."""
    index = corpus_index(CorpusStore.open(Path(recipe.corpus.path)))
    found = []
    for number in range(seeds):
        seed = recipe.plan.seed + number
        whole = [_changed(recipe, condition.keys, seed=seed) for condition in conditions]
        steps = [make_schedule(index=index, plan=item.plan, block_size=item.drafter.block_size).num_steps for item in whole]
        most = max(item.plan.replays for item in whole)
        common = min(steps) // most * most
        found += [(condition.name, _changed(recipe, condition.keys, seed=seed, max_steps=common)) for condition in conditions]
    return found


def make_figures(work: ReplayWork, *, conditions: Sequence[_Condition], runs: Sequence[Trained]) -> ReplayFigures:
    """What the runs so far say of each condition that has any."""
    by_name = {condition.name: {run.seed: run for run in runs if run.name == condition.name} for condition in conditions}
    baseline = by_name[BASELINE]
    found = []
    for condition in conditions:
        own = by_name[condition.name]
        seeds = sorted(own.keys() & baseline.keys())
        if not seeds:
            continue
        first, partners = own[seeds[0]], [baseline[seed].counts for seed in seeds]
        counts = [own[seed].counts for seed in seeds]
        rounded = [run.acceptance_length for seed in seeds if (run := own[seed].rounded) is not None]
        found.append(
            ConditionFigures(
                name=condition.name,
                distance=condition.distance,
                planned_distance=first.planned_distance,
                steps=first.steps,
                anchors=first.anchors,
                packs=first.packs,
                acceptance_length=sum(run.acceptance_length for run in counts) / len(counts),
                rounded_acceptance_length=sum(rounded) / len(rounded) if rounded else None,
                difference=None if condition.name == BASELINE else paired_difference(counts, partners=partners),
            )
        )
    return ReplayFigures(work=work, conditions=tuple(found), runs=tuple(runs))


def _changed(recipe: Recipe, keys: dict[str, Any], *, seed: int, max_steps: int | None = None) -> Recipe:
    """The recipe with other keys, in one process, saving nothing on the way."""
    raw = recipe.model_dump(mode="json")
    changes = {**keys, "checkpoint": {"every_steps": NEVER, "keep": 1}}
    for section, values in changes.items():
        raw[section] |= values
    raw["plan"] |= {"seed": seed} | ({} if max_steps is None else {"max_steps": max_steps})
    raw["placement"] |= {"mode": "colocated", "drafter_ranks": 1}
    return make_recipe(raw)


Results = Callable[[Sequence[tuple[str, Recipe]]], Iterator[Trained]]


@contextmanager
def _trainer(flight: Preflight, *, answers: Sequence[Answer], work: ReplayWork) -> Iterator[Results]:
    """Runs in this process, one after the other, or in several, as they finish."""
    if work.workers == 1:
        ground = Ground(flight.recipe, answers=answers, device=flight.device)
        yield lambda recipes: (ground.train(name, recipe) for name, recipe in recipes)
        return
    base = flight.recipe.model_dump(mode="json")
    threads = max(1, available_cores() // work.workers)
    with ProcessPoolExecutor(work.workers, mp_context=multiprocessing.get_context("spawn")) as pool:

        def results(recipes: Sequence[tuple[str, Recipe]]) -> Iterator[Trained]:
            futures: list[Future[Trained]] = [
                pool.submit(
                    train_in_child, name, recipe.model_dump(mode="json"),
                    base=base, answers=answers, device=flight.device, threads=threads,
                )
                for name, recipe in recipes
            ]  # fmt: skip
            return (future.result() for future in as_completed(futures))

        try:
            yield results
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _told(trained: Trained, done: Sequence[Trained]) -> str:
    """One line of a run, and of its pair where that is there."""
    tau = trained.counts.acceptance_length
    line = f"seed {trained.seed}, {trained.name}: {tau:.3f} after {trained.steps} steps, {trained.seconds:.1f} s"
    if trained.planned_distance is not None:
        line += f", planned {trained.planned_distance} steps apart"
    partner = next((run for run in done if run.name == BASELINE and run.seed == trained.seed), None)
    if partner is not None and partner is not trained:
        line += f"; {tau - partner.counts.acceptance_length:+.3f} to no replays"
    return line
