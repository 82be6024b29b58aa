"""The target runner for any decoder-only model that transformers can load: pack in, hidden states in the slot.

Hidden state k of a token is the output of decoder layer `tap_layers[k]` (0-based), that is `hidden_states[tap + 1]` of
transformers; the model ends after the last tapped layer. Shape letters as in `capture`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.config import TargetInfo
from slipstream.device.recorder import Recorder
from slipstream.errors import TargetError
from slipstream.records import Int64Array, Pack
from slipstream.target.capture import SlotWriter
from slipstream.target.dtypes import DTYPES
from slipstream.target.engine import Engine
from slipstream.target.fingerprint import fingerprint_target
from slipstream.target.float8 import check_device
from slipstream.target.float8_layers import quantise_decoder
from slipstream.target.frame import FrameSize
from slipstream.target.isolation import Leak, measure_leak, probe_pack
from slipstream.target.kernels import Kernels, cuda_kernels
from slipstream.target.layouts import Forward, Packing, lay_out
from slipstream.target.loading import decoder_layers, load_decoder, load_full
from slipstream.target.recorded import RecordedForwards, SlotMemory

__all__ = ["HuggingFaceTarget", "load_full", "load_target"]

WARM_UP_TOKENS = 8192
"""Size of the first forward on a GPU where the plan's is not known."""

HISTORY_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that change with the longest sequence of a forward: above their original length, a document's hidden
states would depend on what else is in the pack."""


class HuggingFaceTarget:
    """A frozen transformers model, cut after its last tap. Made by `load_target`.

    With `kernels` the model is rebuilt around them (`engine`), without it runs as transformers has it. After `record` packs are
    replayed where they fit a recording, and launched where not: the same bits.
    """

    def __init__(
        self,
        *,
        model: Any,
        info: TargetInfo,
        tap_layers: Sequence[int],
        last_hidden: bool,
        fingerprint: str,
        kernels: Kernels | None = None,
    ) -> None:
        self.info, self.tap_layers, self.last_hidden = info, tuple(tap_layers), last_hidden
        self.packing = Packing.ALONE
        self.fingerprint = fingerprint
        self.engine = None if kernels is None else Engine(model, kernels=kernels)
        self._model = model
        self._device = next(model.parameters()).device
        layers = decoder_layers(model, count=model.config.num_hidden_layers)
        self._writer = SlotWriter(layers=[layers[tap] for tap in self.tap_layers], device=self._device)
        self._longest = _longest_document(model.config)
        self._sizes: tuple[FrameSize, ...] = ()
        self._recorded: RecordedForwards | None = None

    @property
    def num_taps(self) -> int:
        """K, the captured layers."""
        return len(self.tap_layers)

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.info.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states that it computes."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def embedding_VD(self) -> Tensor:
        """Its token embedding, where it is: for a drafter beside it whose target ties its head to it."""
        embedding_VD: Tensor = self._model.get_input_embeddings().weight.detach()
        return embedding_VD

    @property
    def bad_rows(self) -> Tensor:
        """int64 scalar on the device: token rows, over all captures, in which some captured value was not finite."""
        return self._writer.bad_rows

    def capture(
        self, pack: Pack, *, hidden_TKD: Tensor, last_hidden_TD: Tensor | None = None, scale_TK: Tensor | None = None
    ) -> int:
        """Write the pack's hidden states into `hidden_TKD` `[T, K, D]`, any floating type; returns how many rows are real.

        A slot of e4m3 values takes their fp32 scales in `scale_TK` `[T, K]`, and no other slot does.
        `last_hidden_TD` `[T, D]` takes the last layer's output after the final norm, for targets loaded with `last_hidden`.
        Rows with values that are not finite are written as they are and counted in `bad_rows`; padding rows are 0. The same
        pack gives the same bits whatever ran before. Raises `TargetError` for a document that the target's rotary embedding
        cannot treat alone.
        """
        return self._capture(
            pack, packing=self.packing, hidden_TKD=hidden_TKD, last_hidden_TD=last_hidden_TD, scale_TK=scale_TK
        )

    def hidden_states(self, pack: Pack, *, packing: Packing) -> Tensor:
        """Hidden states `[T, K, D]` of a pack under any packing, in the target's own type, in new memory: for proofs.

        Values that are not finite are 0 here, so that they are told as what they are (`bad_rows`), not as a leak.
        """
        shape = (pack.capacity_tokens, self.num_taps, self.hidden_size)
        hidden_TKD = torch.zeros(shape, dtype=self.dtype, device=self._device)
        last_hidden_TD = torch.zeros_like(hidden_TKD[:, 0]) if self.last_hidden else None
        self._capture(pack, packing=packing, hidden_TKD=hidden_TKD, last_hidden_TD=last_hidden_TD, scale_TK=None)
        return hidden_TKD.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    @property
    def unrecordable(self) -> str | None:
        """Why its packed forward cannot be recorded, in words; none where it can be."""
        if self.engine is None:
            return "it runs as transformers has it"
        if self.packing is not Packing.PACKED:
            return f"documents run {self.packing.value}"
        if self._longest is not None:
            return "its rotary embedding reads back the longest position"
        return self.engine.unrecordable

    def fill_frames(self, sizes: Sequence[FrameSize]) -> None:
        """Say which sizes hold the packs to come. Where attention has windows, launched forwards take them too: which kernel
        runs depends on the longest sequence there, and replayed forwards have that of their size.
        """
        self._sizes = tuple(sorted(sizes, key=lambda size: size.num_sequences))

    def record(self, recorder: Recorder, *, sizes: Sequence[FrameSize], slot: SlotMemory, example: Pack) -> int:
        """Record the packed forward, for warm-up: packs that one of `sizes` holds are replayed from then on, into slots like
        `slot`, which is used up for it. Every size holds the `example`. Returns the bytes that recordings keep.
        """
        assert self.unrecordable is None, self.unrecordable
        assert self.engine is not None
        (forward,) = lay_out(example, packing=Packing.PACKED)
        self.fill_frames(sizes)
        self._recorded = RecordedForwards(
            engine=self.engine,
            writer=self._writer,
            sizes=sizes,
            slot=slot,
            example=forward,
            num_tokens=example.num_tokens,
            recorder=recorder,
        )
        return self._recorded.nbytes + recorder.nbytes

    def leak(self, *, packing: Packing, pack: Pack | None = None) -> Leak:
        """How far documents reach each other under a packing, on a given pack or on short random documents."""
        vocab_size = self.info.vocab_size
        return measure_leak(self, pack=pack or probe_pack(vocab_size=vocab_size), packing=packing, vocab_size=vocab_size)

    def _capture(
        self, pack: Pack, *, packing: Packing, hidden_TKD: Tensor, last_hidden_TD: Tensor | None, scale_TK: Tensor | None
    ) -> int:
        assert hidden_TKD.shape == (pack.capacity_tokens, self.num_taps, self.hidden_size), hidden_TKD.shape
        assert (last_hidden_TD is not None) == self.last_hidden, "last_hidden slots go with last_hidden=True, and only so"
        self._refuse_long_documents(pack)
        forwards = lay_out(pack, packing=packing)
        with torch.inference_mode():
            if self._recorded is not None and packing is Packing.PACKED and forwards:
                slot = SlotMemory(hidden_TKD=hidden_TKD, scale_TK=scale_TK, last_hidden_TD=last_hidden_TD)
                if self._recorded.replay(forwards[0], num_tokens=pack.num_tokens, slot=slot):
                    return pack.num_tokens
            self._writer.open(hidden_TKD, num_tokens=pack.num_tokens, scale_TK=scale_TK)
            if last_hidden_TD is not None:
                last_hidden_TD[pack.num_tokens :].zero_()
            for forward in forwards:
                output = self._run(forward, packed=packing is Packing.PACKED, num_tokens=pack.num_tokens)
                if last_hidden_TD is not None:
                    self._writer.write_rows(last_hidden_TD, output.last_hidden_state)
            self._writer.close()
        return pack.num_tokens

    def _run(self, forward: Forward, *, packed: bool, num_tokens: int) -> Any:
        if self.engine is not None:
            size = self._size_of(forward, num_tokens=num_tokens) if packed and self.engine.has_windows else None
            frame = self.engine.frame(forward, num_tokens=num_tokens, packed=packed, size=size)
            self._writer.expect(forward.spans, frame=frame if packed else None)
            return self.engine.run(frame)
        self._writer.expect(forward.spans)
        # No cache and no mask: only then does transformers read document borders off the position ids.
        return self._model(
            input_ids=self._to_device(forward.token_ids),
            position_ids=self._to_device(forward.position_ids),
            use_cache=False,
        )

    def _size_of(self, forward: Forward, *, num_tokens: int) -> FrameSize | None:
        return next((size for size in self._sizes if size.holds(forward.cu_seqlens, num_tokens=num_tokens)), None)

    def _to_device(self, array: Int64Array) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)

    def accepts(self, pack: Pack) -> bool:
        """Whether the target's rotary embedding treats every document of the pack alone."""
        return self._longest is None or _longest_of(pack) <= self._longest

    def _refuse_long_documents(self, pack: Pack) -> None:
        if not self.accepts(pack):
            raise TargetError(
                key="max_document_tokens",
                value=_longest_of(pack),
                rule=f"this target changes its rotary embedding beyond {self._longest} tokens, for every document of the pack",
                hint=f"prepare the corpus with documents of at most {self._longest} tokens",
            )


def load_target(
    *,
    info: TargetInfo,
    dtype: str,
    tap_layers: Sequence[int],
    device: str = "cpu",
    packing: str = "auto",
    last_hidden: bool = False,
    pack_tokens: int | None = None,
) -> HuggingFaceTarget:
    """Load a target up to its last tapped layer (whole, with its final norm, for `last_hidden`) and settle how it packs.

    `dtype` "bfloat16", "float32" or "float8"; `packing` "auto", "packed", "padded" or "alone". A packing is only accepted after
    a probe found that documents do not change each other by a single bit; "auto" takes the first that passes. On a GPU a
    bfloat16 or float8 target runs on the packed kernels, or not at all (float8 nowhere else); float32 runs as transformers has
    it, everywhere. There the probe is also the warm-up, so give it the plan's `pack_tokens`: kernels are compiled for that
    size, and tuned at it. Raises `TargetError`.
    """
    taps = list(tap_layers)
    if not taps or taps != sorted(set(taps)) or taps[0] < 0 or taps[-1] > info.num_layers - 2:
        raise TargetError(
            key="target.tap_layers",
            value=taps,
            rule=f"must be ascending ids from 0 to {info.num_layers - 2}, without repeats",
        )
    if dtype not in DTYPES:
        raise TargetError(key="target.dtype", value=dtype, rule=f"must be one of {', '.join(DTYPES)}")
    model = _load_model(info=info, dtype=dtype, device=device, num_layers=None if last_hidden else taps[-1] + 1)
    on_gpu = torch.device(device).type == "cuda" and dtype != "float32"
    target = HuggingFaceTarget(
        model=model,
        info=info,
        tap_layers=taps,
        last_hidden=last_hidden,
        fingerprint=fingerprint_target(info, dtype=dtype),
        kernels=cuda_kernels(hybrid=info.is_hybrid, float8=dtype == "float8") if on_gpu else None,
    )
    target.packing = _settle_packing(target, asked=packing, pack_tokens=pack_tokens)
    return target


def _load_model(*, info: TargetInfo, dtype: str, device: str, num_layers: int | None) -> Any:
    if dtype != "float8":
        return load_decoder(info=info, dtype=dtype, device=device, num_layers=num_layers)
    check_device(device)
    # Rounded layer by layer out of host memory: the device never has the model in bfloat16. Made-up weights begin there.
    begin = device if info.weights == "random" else "cpu"
    model = load_decoder(info=info, dtype=dtype, device=begin, num_layers=num_layers)
    quantise_decoder(model, device=device)
    return model


def _settle_packing(target: HuggingFaceTarget, *, asked: str, pack_tokens: int | None) -> Packing:
    if asked == "auto" and target.engine is not None:
        # The engine is for packed rows: if they leak, that is a fault to be told, not to be got around.
        asked = Packing.PACKED.value
    if asked == "auto":
        # A recurrent state runs through a packed row by construction: not worth a probe, which might be blind to a faint one.
        tried = (Packing.PADDED,) if target.info.is_hybrid else (Packing.PACKED, Packing.PADDED)
        return next((packing for packing in tried if target.leak(packing=packing).isolated), Packing.ALONE)
    packing = Packing(asked)
    if packing is Packing.ALONE:
        return packing
    leak = target.leak(packing=packing, pack=_engine_probe(target, pack_tokens=pack_tokens))
    if not leak.isolated:
        carried = target.info.is_hybrid and target.engine is None
        cause = "its linear-attention layers carry their state across them" if carried else "found by a probe"
        raise TargetError(
            key="target.packing",
            value=asked,
            rule=f"documents of a pack change each other's hidden states, by {leak.others:.2g} of their maximum ({cause})",
            hint='use "auto", "padded" or "alone"' if packing is Packing.PACKED else 'use "auto" or "alone"',
        )
    return packing


def _engine_probe(target: HuggingFaceTarget, *, pack_tokens: int | None) -> Pack | None:
    # Triton's tuning keys leave the number of tokens out: what the first forward chooses is kept, so it must be a large one.
    if target.engine is None:
        return None
    pack = probe_pack(vocab_size=target.info.vocab_size, capacity_tokens=pack_tokens or WARM_UP_TOKENS)
    return pack if target.accepts(pack) else None


def _longest_of(pack: Pack) -> int:
    return int(pack.position_ids[: pack.num_tokens].max(initial=0)) + 1


def _longest_document(config: Any) -> int | None:
    rope = getattr(config, "rope_parameters", None) or {}
    parameters = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    if not any(entry.get("rope_type") in HISTORY_ROPE for entry in parameters):
        return None
    original = next(
        (entry["original_max_position_embeddings"] for entry in parameters if "original_max_position_embeddings" in entry), None
    )
    return int(original or config.max_position_embeddings)
