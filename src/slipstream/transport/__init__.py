"""Stage 4 of 6: hidden states → drafter memory. Waits for: a free slot. Unblocked by: the drafter's last use of a pack.

Packs travel in planned slots. A ledger decides which pack may be written next; the producer writes and seals the slot;
the consumer checks the seal and, when its last use is over, releases the slot, the only thing that flows back. Importing
this package imports no torch: the supervisor runs the broker without it.
"""

from __future__ import annotations

import importlib

from slipstream.transport.ends import HiddenSource

# One line a kind, by placement: the class that a drafter reads from. The contract suite runs over every entry.
SOURCES: dict[str, str] = {
    "colocated": "slipstream.transport.inline:InlineTransport",
    "split": "slipstream.transport.shared:SharedSource",
}


def source_class(placement: str) -> type[HiddenSource]:
    """The class a drafter reads its packs from under that placement; imports torch."""
    module, _, name = SOURCES[placement].partition(":")
    found: type[HiddenSource] = getattr(importlib.import_module(module), name)
    return found


__all__ = ["SOURCES", "source_class"]
