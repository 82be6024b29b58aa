"""What every role opens first: the recipe of its job, the target's dimensions, the drafter's, and the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.config import DrafterShape, Recipe, TargetInfo, make_recipe, read_target_info, resolve_drafter
from slipstream.launch.planning import RunPlan, open_run_plan
from slipstream.launch.roles import Job
from slipstream.runfolder import RunFolder


@dataclass(frozen=True, slots=True)
class Opening:
    """A job's common ground."""

    recipe: Recipe
    info: TargetInfo
    shape: DrafterShape
    folder: RunFolder

    def plan(self, job: Job) -> RunPlan:
        """The planned run, as the job's start step and ranks see it."""
        return open_run_plan(recipe=self.recipe, folder=self.folder, ranks=job["ranks"], start_step=job["start_step"])


def open_job(job: Job) -> Opening:
    """Read a job's recipe and the target's own config."""
    recipe = make_recipe(dict(job["recipe"]))
    info = read_target_info(recipe.target.model, weights=recipe.target.weights)
    shape = resolve_drafter(recipe=recipe, info=info)
    return Opening(recipe=recipe, info=info, shape=shape, folder=RunFolder(Path(job["folder"])))
