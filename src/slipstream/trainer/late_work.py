"""Work that belongs into warm-up and came later: recompiles, autotunes, device segments, page-locked allocations.

Each of them stops a GPU for a moment at best and for a minute at worst, and none shows in a loss. After warm-up the counts
must not grow; what does is named, in a warning and in a line of metrics. Waits for nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch

from slipstream.observe import MetricLog, StepRecord
from slipstream.trainer.hooks import Hook
from slipstream.trainer.warmup import WarmUpReport

logger = logging.getLogger(__name__)

MAX_NAMES = 8
"""Names of what was compiled that a line shows."""


class WorkCounter(Protocol):
    """Counts of a process so far; the names of what was compiled since they were asked for last."""

    def counts(self) -> Mapping[str, int]:
        """Counts by name; they only grow. Waits for nothing."""
        ...

    def names(self) -> list[str]:
        """The newest names of what was compiled or tuned since the last call."""
        ...

    def close(self) -> None:
        """Listen no more."""
        ...


class CudaWork:
    """Counts on a GPU. Listens to Dynamo and to Triton from when it is made until `close`.

    `recompiles` are graphs that Dynamo compiles, backward ones too; `triton_compiles` kernels that Triton compiles or loads,
    candidates of its autotuner included; `autotunes` where this Triton reports them itself.
    `knobs` are Triton's own unless others are given.
    """

    def __init__(self, device: torch.device, *, knobs: Any = None) -> None:
        self._device = device
        self._compiled = {"recompiles": 0, "triton_compiles": 0, "autotunes": 0}
        self._names: deque[str] = deque(maxlen=MAX_NAMES)
        self._undo: list[Callable[[], None]] = []
        self._listen_to_dynamo()
        self._listen_to_triton(knobs)

    def counts(self) -> dict[str, int]:
        """Compiled so far, and allocations asked of the driver so far."""
        device = torch.cuda.memory_stats_as_nested_dict(self._device)
        host = torch.cuda.host_memory_stats()
        return {
            **self._compiled,
            "device_allocations": int(device["num_device_alloc"]),
            "allocation_retries": int(device["num_alloc_retries"]),
            "pinned_allocations": int(host["num_host_alloc"]),
        }

    def names(self) -> list[str]:
        """Newest last."""
        found = list(self._names)
        self._names.clear()
        return found

    def close(self) -> None:
        """Listen no more. May be called twice."""
        while self._undo:
            self._undo.pop()()

    def _note(self, kind: str, name: str) -> None:
        self._compiled[kind] += 1
        self._names.append(name)

    def _listen_to_dynamo(self) -> None:
        from torch._dynamo.callback import callback_handler  # late: it brings all of Dynamo, which only a GPU run needs

        def started(arguments: Any) -> None:
            self._note("recompiles", f"graph {arguments.compile_id} ({arguments.callback_trigger.name.lower()})")

        callback_handler.register_start_callback(started)
        self._undo.append(lambda: callback_handler.remove_start_callback(started))

    def _listen_to_triton(self, knobs: Any) -> None:
        if knobs is None:
            import triton  # late: there is none without a GPU

            knobs = triton.knobs
        self._chain(knobs.compilation, kind="triton_compiles")
        if hasattr(knobs.autotuning, "listener"):
            self._chain(knobs.autotuning, kind="autotunes")

    def _chain(self, knob: Any, *, kind: str) -> None:
        before = knob.listener

        def heard(**arguments: Any) -> None:
            source = arguments.get("src", arguments.get("fn"))
            self._note(kind, f"kernel {getattr(source, 'name', None) or getattr(source, '__name__', 'without a name')}")
            if before is not None:
                before(**arguments)

        knob.listener = heard
        self._undo.append(lambda: setattr(knob, "listener", before))


class LateWork(Hook):
    """Warns by name when a count grows after warm-up. Stands last, so that validation and checkpoints are counted too.

    `settle` ends warm-up once all other hooks have started, and reports it. `log` is none on ranks that write no metrics.
    """

    def __init__(self, *, work: WorkCounter, settle: Callable[[], WarmUpReport], log: MetricLog | None) -> None:
        self._work, self._settle, self._log = work, settle, log
        self._seen: Mapping[str, int] = {}
        self.grown: dict[str, int] = {}
        """By how much each count grew after warm-up, over the run; empty when all is well."""

    def on_start(self, step: int) -> None:
        """Warm-up is over: what counts from here on came late."""
        report = self._settle()
        self._seen = dict(self._work.counts())
        self._work.names()
        logger.info("warm-up took %.1f s: %s", report.seconds, dict(self._seen))
        if report.graphs is not None:
            logger.info("CUDA graphs are %s", report.graphs.told())
        if self._log is not None:
            graphs = {} if report.graphs is None else {"cuda_graphs": asdict(report.graphs)}
            line = {"kind": "warm_up", "step": step, "seconds": report.seconds, "modes": dict(report.modes), **self._seen}
            self._log.write({**line, **graphs})

    def after_step(self, step: int, records: Sequence[StepRecord]) -> None:
        """Compare."""
        self._compare(step)

    def on_checkpoint(self, step: int) -> None:
        """Compare."""
        self._compare(step)

    def on_end(self, step: int, status: str) -> None:
        """Compare for the last time."""
        self._compare(step)
        self._work.close()

    def _compare(self, step: int) -> None:
        now = dict(self._work.counts())
        grown = {name: count - self._seen[name] for name, count in now.items() if count > self._seen[name]}
        self._seen = now
        if not grown:
            return
        for name, count in grown.items():
            self.grown[name] = self.grown.get(name, 0) + count
        names = self._work.names()
        shown = ", ".join(f"{count} {name}" for name, count in grown.items())
        logger.warning("work after warm-up, by step %d: %s%s", step, shown, f" ({'; '.join(names)})" if names else "")
        if self._log is not None:
            self._log.write({"kind": "late_work", "step": step, **grown, "names": names})
