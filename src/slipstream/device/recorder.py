"""Recordings: what a stream was given once, given again in one launch. On a GPU they are CUDA graphs.

A recording keeps the addresses and the numbers that it was made with: what changes lies in memory that stays. Waits for
nothing but in `CudaRecorder`, which belongs into warm-up.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Literal, Protocol, cast

import torch

from slipstream.device.allocated import keep_recording


class Recording(Protocol):
    """Launches that were recorded."""

    def replay(self) -> None:
        """Give them to the current stream again."""
        ...


class Recorder(Protocol):
    """Makes recordings, which share memory for what they allocate: they must be replayed in turn, never at once."""

    @property
    def nbytes(self) -> int:
        """Memory that recordings keep for themselves."""
        ...

    def try_out(self, work: Callable[[], None]) -> None:
        """Run what is to be recorded, so that all it compiles and allocates for good is there."""
        ...

    def record(self, work: Callable[[], None]) -> Recording:
        """Record what `work` launches. Whether it is carried out as well is left open: it must do no harm either way."""
        ...


class CudaRecorder:
    """Records CUDA graphs on a stream of its own, since a default stream cannot be recorded; any stream may replay them.

    Gradients are launched by autograd's thread, on the stream of their forward pass, and recorded with it. Other threads
    may go on copying meanwhile ("thread_local"): what they do has no part in the recording. `stage` says whose they are.
    """

    def __init__(self, device: torch.device, *, stage: Literal["target", "drafter"]) -> None:
        self._device, self._stage = device, stage
        self._stream = torch.cuda.Stream(device)  # of normal priority, which recorded kernels take along
        self._pool = torch.cuda.graph_pool_handle()
        self.nbytes = 0
        """What the pool of all recordings has reserved."""

    def try_out(self, work: Callable[[], None]) -> None:
        """On the stream that records: libraries have handles and workspaces for each stream and thread."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.synchronize(self._device)

    def record(self, work: Callable[[], None]) -> Recording:
        """Nothing is carried out. What `work` raises leaves the device unfit for further recordings."""
        torch.cuda.synchronize(self._device)
        gc.collect()  # a graph of autograd that still lives would tie parameters to the stream that it was made on
        torch.cuda.empty_cache()
        before, held = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        grown = torch.cuda.memory_reserved(self._device) - before
        self.nbytes += grown
        keep_recording(grown - (torch.cuda.memory_allocated(self._device) - held), stage=self._stage)
        return cast(Recording, graph)
