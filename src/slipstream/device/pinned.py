"""Host memory that the device copies from and to by itself: page-locked in place, exactly as large as it is.

Registered rather than allocated: torch's pinned allocator rounds up to powers of two, and cannot share with other
processes. Each process registers the same pages for itself, at about half a second a GiB; so slots are registered one by
one, in the order of their first use, behind the first packs.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from slipstream.errors import PreflightError

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context of the process


class Driver(Protocol):
    """The two calls of the CUDA runtime that are used here; each returns an error code, 0 when all is well."""

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:
        """Page-lock memory that is there."""
        ...

    def cudaHostUnregister(self, ptr: int) -> int:
        """Undo it."""
        ...


class PinnedSlots:
    """Page-locks `spans` (address and bytes of each slot), `order` first to last, in a thread of its own.

    `ensure(i)` returns once slot i can be copied asynchronously, and locks it at once if its turn has not come. Raises
    `PreflightError` for slots that do not begin and end on pages, and when the driver refuses: starting again would not help.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], *, order: Sequence[int], driver: Driver | None = None) -> None:
        for address, nbytes in spans:
            if address % mmap.PAGESIZE or nbytes % mmap.PAGESIZE:
                raise PreflightError(
                    key="plan.pack_tokens",
                    value=f"slots of {nbytes} bytes",
                    rule=f"on CUDA a slot must be whole pages of {mmap.PAGESIZE} bytes, since slots are page-locked one by one",
                    hint="a multiple of 128 tokens, with a hidden size that is a multiple of 16, is",
                )
        self._driver: Driver = driver or torch.cuda.cudart()
        self._spans = spans
        self._locked: set[int] = set()
        self._under_way: set[int] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._failure: PreflightError | None = None
        self._thread = threading.Thread(target=self._register_all, args=(tuple(order),), name="page-locker", daemon=True)
        self._thread.start()

    @property
    def num_registered(self) -> int:
        """Slots that are page-locked by now."""
        return len(self._locked)

    def ensure(self, slot: int) -> None:
        """Wait until the slot is page-locked, or lock it now, whatever others are being locked: a lock around all of them
        would keep who asks waiting for many. From any thread; costs nothing afterwards.
        """
        if slot in self._locked:
            return
        with self._changed:
            self._changed.wait_for(lambda: slot not in self._under_way)
            if slot in self._locked:
                return
            if self._failure is not None:
                raise self._failure
            self._under_way.add(slot)
        try:
            self._register(slot)
        finally:
            with self._changed:
                self._under_way.remove(slot)
                self._changed.notify_all()

    def close(self) -> None:
        """Unlock everything: nothing may be copied any more. May be called twice."""
        self._closing = True
        self._thread.join()
        with self._changed:
            while self._locked:
                self._driver.cudaHostUnregister(self._spans[self._locked.pop()][0])

    def _register_all(self, order: tuple[int, ...]) -> None:
        for slot in order:
            if self._closing:
                return
            try:
                self.ensure(slot)
            except PreflightError as error:  # `ensure` raises it again to whoever needs that slot
                self._failure = error
                return

    def _register(self, slot: int) -> None:
        address, nbytes = self._spans[slot]
        code = int(self._driver.cudaHostRegister(address, nbytes, _PORTABLE))
        if code != 0:
            locked = sum(self._spans[done][1] for done in tuple(self._locked))
            raise PreflightError(
                key="page-locked memory",
                value=f"{locked / 2**30:.2f} GiB so far",
                rule=f"the driver refused {nbytes} bytes more, for slot {slot} (CUDA error {code})",
                hint="lower placement.host_memory_gb, or allow this process more locked memory",
            )
        self._locked.add(slot)
