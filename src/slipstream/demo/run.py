"""The story of `slipstream demo`, stage by stage: target → prepare → plan → train → export and reload → evaluate.

Waits for: nobody but its own stages. What it found lies in `summary.json` of the run folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from slipstream.config import Recipe, load_recipe, read_target_info, resolve_drafter
from slipstream.demo.target import ensure_target
from slipstream.errors import PreflightError
from slipstream.runfolder import RunFolder

STAGES = ("target", "prepare", "plan", "answers", "train", "export", "evaluate")
DATA = Path(str(files("slipstream.demo").joinpath("data")))
RECIPE = Path(str(files("slipstream.demo").joinpath("recipe.toml")))
TRAIN, HELD_OUT = DATA / "train.jsonl", DATA / "held_out.jsonl"


@dataclass(frozen=True, slots=True)
class Event:
    """How far a stage is: `done` of `total` (none while unknown), and a few words. A stage is over when `done == total`."""

    stage: str
    done: int
    total: int | None
    text: str = ""


Show = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class DemoSummary:
    """What the demo measured. Acceptance lengths are tokens a step over all steps of the held-out answers.

    `acceptance_length_before` and `curve` (step, acceptance length) are of the validation during training, in its compute
    type; `acceptance_length` is of the real decode loop with the exported weights in fp32. `lossless`: the answers with the
    drafter are the target's own, near ties apart. `simulated_equal`: every path found without decoding is the decoded one.
    `tokens_per_second` are context tokens trained on, replays counted. Fills are shares of the packs' room.
    """

    acceptance_length_before: float
    acceptance_length: float
    acceptance_length_by_request: float
    curve: list[tuple[int, float]]
    lossless: bool
    near_ties: int
    simulated_equal: bool
    held_out_prompts: int
    steps: int
    train_seconds: float
    tokens_per_second: float
    token_fill: float
    anchor_fill: float
    plain_tokens_per_second: float | None
    drafted_tokens_per_second: float | None
    exported_to: str
    reloaded_equal: bool
    reload_difference: float


def run_demo(*, overrides: Sequence[str] = (), show: Show) -> DemoSummary:
    """Run all stages; `overrides` are `a.b=c` changes of the demo's recipe. An earlier run named `demo` is replaced."""
    recipe = load_recipe(RECIPE, overrides=[f"validation.prompts={json.dumps(str(HELD_OUT))}", *overrides])
    if recipe.validation.prompts is None:
        raise PreflightError(key="validation.prompts", value=None, rule="is required: the demo measures before and after")
    folder = RunFolder(Path(recipe.runs) / recipe.name)
    if recipe.name == "demo" and folder.recipe.is_file():
        shutil.rmtree(folder.root)
    show(Event("target", 0, 1, "SmolLM2-135M, converted once"))
    ensure_target(Path(recipe.target.model))
    show(Event("target", 1, 1, recipe.target.model))
    _prepare(recipe, show=show)
    planned = _plan(recipe, show=show)
    trained = _train(recipe, num_steps=planned.steps, show=show)
    exported, difference = _export(recipe, trained=trained, out=folder.exports / "final", show=show)
    measured = _evaluate(recipe, exported=exported, show=show)
    curve = [(int(line["step"]), float(line["acceptance_length"])) for line in trained.validations]
    summary = DemoSummary(
        acceptance_length_before=curve[0][1],
        acceptance_length=measured.decoded.tau_steps or 0.0,
        acceptance_length_by_request=measured.decoded.tau_requests or 0.0,
        curve=curve,
        lossless=measured.lossless.different == 0,
        near_ties=measured.lossless.near_ties,
        simulated_equal=measured.equal_paths == measured.prompts,
        held_out_prompts=measured.prompts,
        steps=trained.steps,
        train_seconds=trained.train_seconds,
        tokens_per_second=planned.trained_tokens / trained.train_seconds,
        token_fill=planned.token_fill,
        anchor_fill=planned.anchor_fill,
        plain_tokens_per_second=measured.plain_tokens_per_second,
        drafted_tokens_per_second=measured.drafted_tokens_per_second,
        exported_to=str(exported),
        reloaded_equal=True,
        reload_difference=difference,
    )
    (folder.root / "summary.json").write_text(json.dumps(asdict(summary), indent=1) + "\n")
    return summary


def _prepare(recipe: Recipe, *, show: Show) -> None:
    from slipstream.corpus.prepare import PrepareOptions, PrepareProgress, prepare

    def progress(now: PrepareProgress) -> None:
        show(Event("prepare", now.bytes_read, now.bytes_total, f"{now.num_documents} conversations"))

    options = PrepareOptions(mask_token_id=recipe.drafter.mask_token_id, strict=True, overwrite=True)
    meta = prepare([TRAIN], recipe.target.model, Path(recipe.corpus.path), options, progress)
    show(Event("prepare", 1, 1, f"{meta.num_documents} conversations, {meta.num_tokens:,} tokens"))


def _plan(recipe: Recipe, *, show: Show) -> Any:
    """The schedule's figures; training makes the same schedule again, since it follows from recipe and corpus alone."""
    from slipstream.corpus.store import CorpusStore
    from slipstream.plan import CorpusIndex, make_schedule

    show(Event("plan", 0, 1))
    store = CorpusStore.open(Path(recipe.corpus.path))
    index = CorpusIndex(num_tokens=store.num_tokens, num_anchors=store.num_anchors, fingerprint=store.meta.fingerprint)
    summary = make_schedule(index=index, plan=recipe.plan, block_size=recipe.drafter.block_size).summary()
    show(Event("plan", 1, 1, f"{summary.steps} steps, {summary.anchors:,} anchors"))
    return summary


def _train(recipe: Recipe, *, num_steps: int, show: Show) -> Any:
    from slipstream.launch.local import train_run
    from slipstream.launch.preflight import preflight

    def report(worker: str, kind: str, payload: Any) -> None:
        if kind == "progress" and payload["stage"] == "answers":
            show(Event("answers", payload["done"], payload["of"], "of the target, to held-out prompts"))
        elif kind == "record" and payload["kind"] == "train":
            show(Event("train", int(payload["step"]) + 1, num_steps))
        elif kind == "record" and payload["kind"] == "validation":
            text = f"acceptance length {payload['acceptance_length']:.3f}"
            show(Event("train", int(payload["step"]), num_steps, text))

    show(Event("answers", 0, None, "of the target, to held-out prompts"))
    return train_run(flight=preflight(recipe), given=RECIPE.read_text(), on_report=report)


def _export(recipe: Recipe, *, trained: Any, out: Path, show: Show) -> tuple[Path, float]:
    """Write the folder, have the `dflash` package read it and compute the same; raises `ExportError` where it does not.

    Of the checkpoint that `slipstream export` takes of a run.
    """
    from slipstream.export.dflash_format import export_dflash
    from slipstream.export.verify import Verified, verify_export
    from slipstream.target.ends import load_frozen_ends
    from slipstream.trainer.checkpoint import best, read_drafter_state

    show(Event("export", 0, 1, "read back by the dflash package"))
    info = read_target_info(recipe.target.model)
    ends = load_frozen_ends(info=info, dtype="float32")
    verified: list[Verified] = []
    folder = export_dflash(
        drafter_state=read_drafter_state(best(trained.folder / "checkpoints") or trained.checkpoint)[1],
        shape=resolve_drafter(recipe=recipe, info=info),
        info=info,
        out=out,
        verify=lambda part: verified.append(verify_export(part, embedding_VD=ends.embedding_VD, head_VD=ends.head_VD)),
        target_name=recipe.target.model,
    )
    show(Event("export", 1, 1, str(out)))
    return folder, verified[0].largest_difference


def _evaluate(recipe: Recipe, *, exported: Path, show: Show) -> Any:
    from slipstream.demo.measure import measure_export

    def answered(done: int, total: int) -> None:
        show(Event("evaluate", done, total, "held-out answers without and with it, fp32"))

    show(Event("evaluate", 0, None, "held-out answers without and with it, fp32"))
    return measure_export(
        folder=exported,
        info=read_target_info(recipe.target.model),
        prompts=HELD_OUT,
        max_new_tokens=recipe.validation.max_new_tokens,
        on_answer=answered,
    )
