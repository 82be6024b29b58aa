"""What only a process with a GPU knows of its time: how long stages take there, and when the GPU has run dry.

A loop that launches ahead of its GPU waits in two ways: for the GPU, which still has work, and, once it has none, for what
the work would need. Only the second is time that somebody else costs.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from slipstream.device.completer import Completer, CompleterThread
from slipstream.device.streams import CudaStreams, Event, Streams
from slipstream.observe import Account
from slipstream.observe.accounts import Claim
from slipstream.observe.stages import cuda_stages

log = logging.getLogger(__name__)

WATCHED = 16
"""Waits that may be watched at once: more than a loop runs ahead."""


class DryWatch:
    """Turns a wait into another one when the device has done all that it was given before the wait began."""

    def __init__(self, streams: Streams, completer: Completer, *, watched: int = WATCHED) -> None:
        self._streams, self._completer = streams, completer
        self._free: list[Event] = [streams.event() for _ in range(watched)]
        for event in self._free:  # what a driver makes of an event it makes at its first use
            streams.record(event, on=streams.current())

    def until_dry(self, claim: Claim, then: str) -> None:
        """What remains of a claim once the current stream has run dry is `then`. Waits for nothing."""
        if self._free:
            event = self._free.pop()
            self._streams.record(event, on=self._streams.current())
            self._completer.submit(event, partial(self._dry, event, claim, then))

    def close(self) -> None:
        """Watch no more."""
        self._completer.close()

    def _dry(self, event: Event, claim: Claim, then: str) -> None:
        claim.become(then)
        self._free.append(event)


def time_stages(account: Account, *, device: str) -> None:
    """From here on the account times stages of the stream that is current, if it keeps spans. Waits for the device once;
    nothing on a CPU.
    """
    if device == "cuda" and account.spans is not None:
        account.stages = cuda_stages(account.spans, device=_current())


def dry_watch(*, device: str) -> DryWatch | None:
    """What tells a process's waits apart from those for its own GPU; none on a CPU, which runs nothing ahead."""
    if device == "cpu":
        return None
    streams = CudaStreams(_current())
    failed = partial(log.warning, "waits are told apart no more: %s")
    return DryWatch(streams, CompleterThread(streams=streams, name="dry-watch", failed=failed))


def _current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
