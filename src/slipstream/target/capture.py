"""What every target offers, and how a layer's output becomes rows of a slot. Runs inside the forward pass itself.

Shape letters: T context tokens of a pack · K tapped layers · D hidden size · R rows of a forward · L tokens of a row · S tokens
of one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.device.float8 import quantise_rows
from slipstream.records import Pack
from slipstream.target.elementwise import elementwise
from slipstream.target.frame import Frame
from slipstream.target.layouts import Span


class Target(Protocol):
    """A frozen model that turns a pack into hidden states. What it writes is a function of the pack's documents alone."""

    fingerprint: str
    """Identity of the weights and the config."""
    bad_rows: Tensor
    """int64 scalar on the target's device: token rows, over all captures, in which some tap was not finite."""

    @property
    def num_taps(self) -> int:
        """K."""

    @property
    def hidden_size(self) -> int:
        """D."""

    def capture(
        self, pack: Pack, *, hidden_TKD: Tensor, last_hidden_TD: Tensor | None = None, scale_TK: Tensor | None = None
    ) -> int:
        """Write the pack's hidden states into a slot `[T, K, D]` of any floating type; returns how many rows are real.

        A slot of e4m3 values takes their fp32 scales in `scale_TK`, and no other slot does.
        """


class SlotWriter:
    """Forward hooks on the tapped layers, which write straight into the open slot, so that no layer's output outlives it.

    Values that are not finite are written as they are, so that whoever trains on them finds them and skips the step; the rows
    they stand in are counted on the device. Padding rows are 0, by selection, never by a product (0 · NaN is NaN). Where
    attention masks documents instead of keeping them apart, a NaN spoils every document of the row, and all are counted.
    """

    def __init__(self, *, layers: Sequence[nn.Module], device: torch.device) -> None:
        self.bad_rows = torch.zeros((), dtype=torch.int64, device=device)
        self._hidden_TKD: Tensor | None = None
        self._scale_TK: Tensor | None = None
        self._spans: tuple[Span, ...] = ()
        self._frame: Frame | None = None
        self._bad_T: Tensor = torch.zeros(0, dtype=torch.bool, device=device)
        for tap, layer in enumerate(layers):
            layer.register_forward_hook(self._hook(tap))

    def open(self, hidden_TKD: Tensor, *, num_tokens: int, scale_TK: Tensor | None = None) -> None:
        """Begin a pack: clear its padding rows and the row flags."""
        assert (scale_TK is not None) == (hidden_TKD.dtype == torch.float8_e4m3fn), "scales go with e4m3, and only so"
        hidden_TKD[num_tokens:].zero_()
        if scale_TK is not None:
            scale_TK[num_tokens:].zero_()
        self._hidden_TKD, self._scale_TK = hidden_TKD, scale_TK
        self._bad_T = torch.zeros(len(hidden_TKD), dtype=torch.bool, device=self.bad_rows.device)

    def expect(self, spans: tuple[Span, ...], *, frame: Frame | None = None) -> None:
        """Say which rows of the pack the next forward computes, and where in its own rows they lie.

        A `frame` says that the forward is the pack itself, padding included: such a row is written in one pass.
        """
        self._spans, self._frame = spans, frame

    def write_rows(self, destination_TD: Tensor, hidden_RLD: Tensor, *, scale_T: Tensor | None = None) -> None:
        """Copy the expected rows of one layer's output, cast first: what overflows the slot's type is not finite there.

        With a `scale_T` they are rounded to e4m3 instead, here, on the stream that made them; a row with a value that is not
        finite gets the scale NaN.
        """
        frame = self._frame
        if frame is not None and destination_TD.device == hidden_RLD.device:
            hidden_TD = hidden_RLD.flatten(0, 1)
            if scale_T is None:
                ops = elementwise(compile_it=frame.compiled)
                ops.keep_rows(hidden_TD, destination_TD, self._bad_T, frame.num_tokens)
            else:
                quantise_rows(
                    hidden_TD, values_RD=destination_TD, scale_R=scale_T, bad_R=self._bad_T, num_tokens=frame.num_tokens
                )
            return
        for span in self._spans:
            rows = slice(span.start, span.start + span.length)
            if scale_T is not None:
                hidden_SD = hidden_RLD[span.row, : span.length].to(destination_TD.device)
                quantise_rows(hidden_SD, values_RD=destination_TD[rows], scale_R=scale_T[rows], bad_R=self._bad_T[rows])
                continue
            hidden_SD = hidden_RLD[span.row, : span.length].to(destination_TD.dtype)
            destination_TD[rows] = hidden_SD
            self._bad_T[rows] |= ~torch.isfinite(hidden_SD).all(dim=-1)

    def close(self) -> None:
        """End a pack: add its bad rows to the count, and let go of the slot."""
        self.bad_rows += self._bad_T.sum()
        self._hidden_TKD, self._scale_TK, self._spans, self._frame = None, None, (), None

    def _hook(self, tap: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self._hidden_TKD is not None:
                scale_T = None if self._scale_TK is None else self._scale_TK[:, tap]
                self.write_rows(self._hidden_TKD[:, tap], output[0] if isinstance(output, tuple) else output, scale_T=scale_T)

        return hook
