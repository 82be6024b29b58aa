"""The target behind a cache that can be rolled back, whatever kinds of layers it has.

`cache.crop(-n)` takes tokens back from attention layers. A recurrent state (gated delta net, Mamba) cannot be cropped:
transformers 5.24 leaves the rejected tokens in it without an error. Such layers are copied before the block is verified,
put back, and the tokens that stand are run again.

Shape letters: P prompt · S tokens · B block · K tapped layers · D hidden · V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from slipstream.device.finite import not_finite
from slipstream.errors import TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Logits `[S, V]` (only the last row after a prefill) and tapped hidden states `[S, K, D]`, K = 0 if not asked for."""

    logits_SV: Tensor
    hidden_SKD: Tensor


class TargetSession:
    """One answer at a time: `prefill`, then `verify` a block and `keep` what stands of it, again and again.

    `target` is a causal language model of transformers in eval mode; `tap_layers` are 0-based ids of layer outputs, none of
    them the last, whose HF hidden state is after the final norm.
    """

    def __init__(self, target: PreTrainedModel, *, tap_layers: Sequence[int]) -> None:
        self.target = target
        self._taps = tuple(tap_layers)
        # transformers 5.24 renames the argument, and drops the old name in 5.40.
        self._cache_key = "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"
        self._cache = DynamicCache(config=target.config)
        self._block: Tensor | None = None
        self._output: TargetOutput | None = None
        self._states: _States | None = None
        self._bad = torch.zeros((), dtype=torch.bool, device=self.device)
        self.length = 0
        self.num_replays = 0

    @property
    def embedding_VD(self) -> Tensor:
        """The target's input embedding, as stored."""
        return cast(Tensor, self.target.get_input_embeddings().weight)

    @property
    def head_VD(self) -> Tensor:
        """The weight of the target's output head."""
        return cast(Tensor, self.target.get_output_embeddings().weight)

    @property
    def device(self) -> torch.device:
        """Where the target's embedding lies."""
        return self.embedding_VD.device

    def check_finite(self) -> None:
        """Raise `TargetError` if anything that the target gave since `prefill` was not finite. Waits for the device."""
        if bool(self._bad):
            raise TargetError(
                key="target.dtype",
                value=str(self.target.dtype).removeprefix("torch."),
                rule=f"the target gave NaN or Inf in an answer that reached token {self.length}; no drafter can be measured so",
                hint="bfloat16 or float32 may hold what float16 cannot; otherwise its weights are damaged",
            )

    def prefill(self, token_ids: Sequence[int], *, rollback: bool = True) -> TargetOutput:
        """Start an answer: run the prompt in an empty cache. `rollback=False` is for plain decoding, which only appends."""
        self._cache = DynamicCache(config=self.target.config)
        if rollback:
            self._cache.activate_past_recording()
        self._block = self._output = self._states = None
        self._bad = torch.zeros_like(self._bad)
        self.length, self.num_replays = 0, 0
        output = self._run(torch.tensor(token_ids, device=self.device), last_only=True, taps=rollback)
        self.length = len(token_ids)
        if rollback:
            self._cache.crop(0)
        return output

    def step(self, token_id: int) -> Tensor:
        """Plain decoding: append one token for good; logits `[V]` of the next."""
        output = self._run(torch.tensor([token_id], device=self.device), last_only=True, taps=False)
        self.length += 1
        return output.logits_SV[-1]

    def verify(self, block_B: Tensor) -> Tensor:
        """Run a block (anchor and drafted tokens, int64 `[B]`) after what was kept; logits `[B, V]`. `keep` must follow."""
        assert self._block is None, "keep() must follow verify()"
        self._states = None if self._croppable() else _States.of(self._cache)
        self._block = block_B
        self._output = self._run(block_B, last_only=False, taps=True)
        return self._output.logits_SV

    def keep(self, num_tokens: int) -> Tensor:
        """Keep the first `num_tokens` (at least 1) of the verified block, forget the rest; their hidden states `[S, K, D]`."""
        assert self._block is not None, "verify() must come first"
        assert self._output is not None, "verify() must come first"
        block, output = self._block, self._output
        self._block = self._output = None
        if num_tokens == len(block) or self._states is None:
            self._cache.crop(num_tokens - len(block))
        else:
            self._cache.crop(-len(block))
            self._states.restore(self._cache)
            output = self._run(block[:num_tokens], last_only=True, taps=True)
            self._cache.crop(0)
            self.num_replays += 1
        self.length += num_tokens
        return output.hidden_SKD[:num_tokens]

    def _croppable(self) -> bool:
        return all(layer.is_croppable for layer in self._cache.layers)

    def _run(self, token_ids_S: Tensor, *, last_only: bool, taps: bool) -> TargetOutput:
        positions = torch.arange(self.length, self.length + len(token_ids_S), device=token_ids_S.device)
        arguments: dict[str, Any] = {self._cache_key: self._cache, "logits_to_keep": 1 if last_only else 0}
        output = self.target(
            input_ids=token_ids_S[None],
            position_ids=positions[None],
            use_cache=True,
            output_hidden_states=taps,
            **arguments,
        )
        logits_SV: Tensor = output.logits[0]
        self._bad |= logits_SV.isnan().any()  # not Inf: models may rule tokens out by it
        if not taps:
            return TargetOutput(logits_SV=logits_SV, hidden_SKD=logits_SV.new_empty(len(token_ids_S), 0, 0))
        hidden_SKD = torch.stack([output.hidden_states[tap + 1][0] for tap in self._taps], dim=1)
        self._bad |= not_finite(hidden_SKD).any()
        return TargetOutput(logits_SV=logits_SV, hidden_SKD=hidden_SKD)


@dataclass(frozen=True, slots=True)
class _States:
    """Copies of every recurrent and convolution state: layer, name of the dict, index, tensor."""

    tensors: tuple[tuple[int, str, int, Tensor], ...]

    @classmethod
    def of(cls, cache: DynamicCache) -> _States:
        found = []
        for number, layer in enumerate(cache.layers):
            for name in ("conv_states", "recurrent_states"):
                for index, state in getattr(layer, name, {}).items():
                    if state is not None:
                        found.append((number, name, index, state.clone()))
        return cls(tensors=tuple(found))

    def restore(self, cache: DynamicCache) -> None:
        """Put the copies back; each is used once, so it may be written to afterwards."""
        for number, name, index, state in self.tensors:
            getattr(cache.layers[number], name)[index] = state
