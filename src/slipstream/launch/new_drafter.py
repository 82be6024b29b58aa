"""The drafter that a run begins with. Its weights are drawn while the process loads what else it needs: the plan, the target.

Waits for: nothing. A run that takes its weights from a checkpoint or an export draws none.
"""

from __future__ import annotations

import threading
from types import TracebackType

from slipstream.config import DrafterShape, Recipe
from slipstream.drafter import DFlashDrafter, build_drafter
from slipstream.launch.roles import Job


def new_drafter(*, recipe: Recipe, shape: DrafterShape, device: str, draws: bool = True) -> DFlashDrafter:
    """The recipe's drafter before its first step: weights from the plan's seed; without `draws`, for the caller to load."""
    return build_drafter(
        shape=shape,
        dtype=recipe.drafter.dtype,
        device=device,
        seed=recipe.plan.seed if draws else None,
        attention=recipe.drafter.attention,
        family=recipe.drafter.type,
    )


class NewDrafter:
    """A job's drafter, whose weights another thread draws while its `with` lasts; leaving that early ends the thread.

    Made by the thread that trains: the module is there at once, its weights are once `ready` has returned.
    """

    def __init__(self, *, job: Job, recipe: Recipe, shape: DrafterShape) -> None:
        self.drafter = new_drafter(recipe=recipe, shape=shape, device=job["device"], draws=False)
        self._seed = recipe.plan.seed
        self._draws = job["checkpoint"] is None and recipe.drafter.warm_start is None
        self._leaving = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._draw, name="first-weights", daemon=True)

    def __enter__(self) -> NewDrafter:
        if self._draws:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leaving.set()
        self._join()

    def ready(self) -> DFlashDrafter:
        """The drafter; waits until its weights are drawn, where they are."""
        self._join()
        if self._error is not None:
            raise self._error
        return self.drafter

    def _join(self) -> None:
        if self._draws:
            self._thread.join()

    def _draw(self) -> None:
        try:
            for _ in self.drafter.drawing(seed=self._seed):
                if self._leaving.is_set():
                    return
        except Exception as error:  # carried to the thread that asks for the drafter, where it belongs
            self._error = error
