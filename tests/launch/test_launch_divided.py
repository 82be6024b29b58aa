"""Whole runs whose drafter ranks divide validation: the same lines as one rank writes, in both placements, also over a stop."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_material import NUM_WORDS, tiny_recipe

from slipstream.config import Recipe
from slipstream.corpus.prepare import prepare
from slipstream.errors import Interrupted
from slipstream.launch.local import train_run
from slipstream.launch.planning import open_run_plan
from slipstream.launch.preflight import preflight
from slipstream.plan import Schedule
from slipstream.runfolder import RunFolder
from slipstream.trainer.checkpoint import latest

EVERY = 1
STOPPED_AT = 4


@pytest.fixture(scope="module")
def make_recipe(material: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    """Recipes of runs over a corpus of the one word that the target answers to everything, with others among it."""
    runs = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(5)
    rows = []
    for _ in range(60):
        words = [f"w{rng.integers(NUM_WORDS)}" if rng.random() < 0.1 else "assistant" for _ in range(rng.integers(4, 30))]
        messages = [
            {"role": "user", "content": f"w{rng.integers(NUM_WORDS)}"},
            {"role": "assistant", "content": " ".join(words)},
        ]
        rows.append({"messages": messages})
    (runs / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare([runs / "train.jsonl"], target=material["target"], out=runs / "corpus")

    def make(name: str, **changes: Any) -> Recipe:
        keys = {
            "corpus__path": str(runs / "corpus"),
            "placement__mode": "colocated",
            "plan__packs_per_step": 2,
            "optimizer__lr": 2e-3,
            "validation__prompts": material["prompts"],
            "validation__max_new_tokens": 60,
            "validation__every_steps": EVERY,
        }
        return tiny_recipe(material, runs, name=name, **(keys | changes))

    return make


def run(recipe: Recipe, *, resume: bool = False, on_report: Any = None) -> RunFolder:
    return RunFolder(train_run(flight=preflight(recipe, resume=resume), on_report=on_report).folder)


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(folder: RunFolder, kind: str) -> list[dict[str, Any]]:
    """Lines of a kind without what clocks and the machine say; of steps made twice, the later line."""
    clocks = ("time", "seconds", "_per_second", "memory_bytes")
    found = {}
    for line in lines_of(folder.metrics):
        if line["kind"] == kind:
            found[line["step"]] = {name: value for name, value in line.items() if not name.endswith(clocks)}
    return [found[step] for step in sorted(found)]


@pytest.fixture(scope="module")
def alone(make_recipe: Callable[..., Recipe]) -> RunFolder:
    """One rank."""
    return run(make_recipe("alone"))


def test_two_ranks_write_the_lines_of_one(make_recipe: Callable[..., Recipe], alone: RunFolder) -> None:
    folder = run(make_recipe("two", placement__drafter_ranks=2))
    expected = written(alone, "validation")
    assert len({line["acceptance_length"] for line in expected}) > 2, "a drafter that learns"
    assert written(folder, "validation") == expected
    assert written(folder, "train") == written(alone, "train")
    check_shares(folder, steps=[line["step"] for line in expected])


def check_shares(folder: RunFolder, *, steps: list[int]) -> None:
    """Each worker has captured packs of its own, and been in the state of validation for each of the measurements."""
    first = Schedule.load(folder.schedule).num_packs
    captured = []
    for worker in ("worker-0", "worker-1"):
        spans = lines_of(folder.spans / f"{worker}.jsonl")[1:]
        assert sorted({span[5] for span in spans if span[1] == "validate"}) == steps
        captured.append({span[4] - first for span in spans if span[1] == "target" and span[4] >= first})
        assert lines_of(folder.accounts / f"{worker}.jsonl")[-1]["states"]["validate"] > 0
    count = len(captured[0]) + len(captured[1])
    assert count > 1
    assert captured == [set(range(rank, count, 2)) for rank in (0, 1)]


def test_a_stop_at_a_validation_and_resume_change_no_line(make_recipe: Callable[..., Recipe], alone: RunFolder) -> None:
    """Two ranks that read from a target worker; asked to stop while the word of a measurement comes in."""
    recipe = make_recipe("cut", placement__mode="split", placement__drafter_ranks=2)

    def on_report(worker: str, kind: str, payload: Any) -> None:
        if kind == "record" and payload["kind"] == "validation" and payload["step"] == STOPPED_AT:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        run(recipe, on_report=on_report)
    folder = RunFolder(Path(recipe.runs) / recipe.name)
    cut = latest(folder.checkpoints)
    assert cut is not None
    steps = [line["step"] for line in written(folder, "validation")]
    assert STOPPED_AT <= int(cut.name.removeprefix("step-")) < written(alone, "validation")[-1]["step"]
    run(recipe, resume=True)
    assert written(folder, "validation") == written(alone, "validation")
    assert written(folder, "train") == written(alone, "train")
    lines = [line["step"] for line in lines_of(folder.metrics) if line["kind"] == "validation"]
    assert lines[: len(steps)] == steps
    assert len(set(lines)) == len(lines), "the checkpoint's own step is not measured twice"


@pytest.mark.slow
def test_three_ranks_of_which_one_has_nothing_to_measure(make_recipe: Callable[..., Recipe]) -> None:
    """Gradients of three are summed in another order, which moves weights by a last bit and no draft here."""
    changes = {"plan__packs_per_step": 3, "plan__pack_tokens": 256}
    whole = run(make_recipe("three-alone", **changes))
    recipe = make_recipe("three", placement__mode="split", placement__drafter_ranks=3, **changes)
    folder = run(recipe)
    plan = open_run_plan(recipe=recipe, folder=folder, ranks=3, start_step=0)
    assert [len(plan.measured_by(rank)) for rank in range(3)] == [1, 1, 0]
    assert written(folder, "validation") == written(whole, "validation")
    assert lines_of(folder.accounts / "drafter-2.jsonl")[-1]["states"]["validate"] > 0
