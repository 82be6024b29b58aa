"""The next steps, drawn by a background thread while the present one trains.

Anchors are not stored for the run, and drawing a step takes milliseconds: this takes them off the loop. Depth is one integer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from slipstream.plan.planner import Planner
from slipstream.records import Pack, Step


class StepsAhead:
    """Hands out steps in order from `start_step`, up to `depth` of them ready, with the packs of `columns`.

    To be used in a `with` block, or closed. What fails in the background is raised by the next `step`.
    """

    def __init__(self, *, planner: Planner, start_step: int, columns: Sequence[int], depth: int = 8) -> None:
        assert depth >= 1
        self._planner, self._columns, self._depth = planner, tuple(columns), depth
        self._expected = start_step
        self._ready: deque[Step] = deque()
        self._packs: dict[int, Pack] = {}
        self._finished: list[int] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._draw, args=(start_step,), name="steps-ahead", daemon=True)
        self._thread.start()

    def step(self, step: int) -> Step:
        """The next step, which must be `step`; waits until it is drawn."""
        with self._changed:
            assert step == self._expected, f"steps are taken in order: {self._expected} is next, not {step}"
            assert step < self._planner.schedule.num_steps, f"the schedule ends at step {self._planner.schedule.num_steps}"
            assert not self._closed, "closed"
            self._changed.wait_for(lambda: bool(self._ready) or self._failure is not None)
            if not self._ready:
                assert self._failure is not None
                raise self._failure
            taken = self._ready.popleft()
            self._expected += 1
            # A pack is kept while the step of its last use runs, and dropped when the next one is asked for.
            for pack_id in self._finished:
                self._packs.pop(pack_id, None)
            self._finished = [use.pack_id for use in taken.uses if use.is_last]
            self._changed.notify_all()
            return taken

    def pack(self, pack_id: int) -> Pack:
        """The tokens of a pack; at once for packs of `columns` that a step handed out uses."""
        with self._changed:
            known = self._packs.get(pack_id)
        return self._planner.pack(pack_id) if known is None else known

    def close(self) -> None:
        """Stop drawing and wait for the thread to end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> StepsAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _draw(self, start_step: int) -> None:
        try:
            for index in range(start_step, self._planner.schedule.num_steps):
                step = self._planner.step(index)
                needed = {step.uses[column].pack_id for column in self._columns}
                packs = {pack_id: self._planner.pack(pack_id) for pack_id in needed - self._packs.keys()}
                with self._changed:
                    self._packs.update(packs)
                    self._ready.append(step)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: len(self._ready) < self._depth or self._closed)
                    if self._closed:
                        return
        except Exception as error:  # the border of a thread: handed to whoever asks next
            with self._changed:
                self._failure = error
                self._changed.notify_all()
