"""DFlash: a drafter that fills a block of masked slots at once, reading the target's hidden states as keys and values.

After arXiv 2602.06036 and the served behaviour of the `dflash` package. The embedding and the head are the target's.

Shape letters: T context tokens · N anchors · B block size · Q = N * B · K tapped layers · D hidden · V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from slipstream.config import DrafterShape
from slipstream.config.recipe import LayerType
from slipstream.drafter.attention import SdpaAttention, choose_attention
from slipstream.drafter.blocks import Send
from slipstream.drafter.decode import DraftContext
from slipstream.drafter.fused import BlockRows, fused_context, fused_layers, fused_norm
from slipstream.drafter.initial import draw_weights
from slipstream.drafter.layers import DecoderLayer, Linear, RMSNorm, Rope, rope_tables
from slipstream.drafter.masks import IntArray, Spans, make_spans
from slipstream.records import BlockBatch, BoolArray

Masks = Mapping[str, Any]
"""By kind of layer, what the drafter's attention made of a batch's spans."""


class DFlashDrafter(nn.Module):
    """The drafter's trained weights, named as servers read them, with a training pass and a decode mode over the same code.

    `shape` fixes all dimensions, `dtype` the compute type of weights and activations.
    """

    def __init__(self, *, shape: DrafterShape, dtype: torch.dtype, device: torch.device, attention: str) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        with torch.device(device):
            self.layers = nn.ModuleList(DecoderLayer(shape=shape, dtype=dtype) for _ in range(shape.num_layers))
            self.fc = Linear(inputs=shape.num_taps * hidden, outputs=hidden, dtype=dtype)
            self.hidden_norm = RMSNorm(size=hidden, eps=eps, dtype=dtype)
            self.norm = RMSNorm(size=hidden, eps=eps, dtype=dtype)
        self.shape = shape
        self.dtype = dtype
        self.kernel = choose_attention(name=attention, device=device)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.fc.weight.device

    def initialise(self, *, seed: int) -> None:
        """Fill matrices with normal(0, `initializer_range`) and norms with ones: the same values on every device."""
        for _ in self.drawing(seed=seed):
            pass

    def drawing(self, *, seed: int) -> Iterator[None]:
        """`initialise` in small parts, for a thread that may have to end early."""
        return draw_weights(self.parameters(), seed=seed, std=self.shape.initializer_range)

    def make_masks(self, batch: BlockBatch, *, lengths: IntArray | None = None, send: Send | None = None) -> Masks:
        """Masks of a batch for all layers, of blocks that are cut to `lengths` slots `[N]`, or of whole ones.

        From a batch on the CPU this waits for nothing; from one on CUDA, for the GPU. `send` brings arrays to the device.
        """
        anchors, starts, valid = (
            tensor.cpu().numpy() for tensor in (batch.anchors_N, batch.anchor_start_N, batch.anchor_valid_N)
        )
        spans = self.layer_spans(
            anchors=anchors,
            starts=starts,
            valid=valid,
            context_tokens=len(batch.context_positions_T),
            block_size=batch.positions_NB.shape[1],
            lengths=lengths,
        )
        return {kind: self.kernel.mask(seen, device=self.device, send=send) for kind, seen in spans.items()}

    def layer_spans(
        self,
        *,
        anchors: IntArray,
        starts: IntArray,
        valid: BoolArray,
        context_tokens: int,
        block_size: int,
        lengths: IntArray | None = None,
    ) -> dict[LayerType, Spans]:
        """What every slot sees, for each kind of layer that the drafter has; the arrays are `[N]`, as in `make_spans`."""
        return {
            kind: make_spans(
                kind=kind,
                anchors=anchors,
                starts=starts,
                valid=valid,
                block_size=block_size,
                context_tokens=context_tokens,
                window=self.shape.sliding_window,
                lengths=lengths,
            )
            for kind in dict.fromkeys(self.shape.layer_types)
        }

    def forward(
        self,
        *,
        hidden_TKD: torch.Tensor,
        batch: BlockBatch,
        embedding_VD: torch.Tensor,
        masks: Masks | None = None,
    ) -> torch.Tensor:
        """Hidden states `[N, B, D]` of slots 1 to B - 1 after the final norm, in the compute type; slot 0 holds anything.

        `hidden_TKD` is a slot's content in any float type, taps ascending; tensors of `batch` are on the drafter's device.
        `masks` are `make_masks(batch)`, made here if not given; on CUDA make them from the CPU batch, which waits for nothing.
        Context rows that no anchor sees, padding above all, may hold anything, NaN included: they are replaced by 0.
        """
        masks = self.make_masks(batch) if masks is None else masks
        return PASSES[self.device.type](self, hidden_TKD, batch, embedding_VD, masks)

    def module_pass(
        self, hidden_TKD: torch.Tensor, batch: BlockBatch, embedding_VD: torch.Tensor, masks: Masks
    ) -> torch.Tensor:
        """The training pass through the modules that decoding uses, differentiated by autograd."""
        seen_T = _seen_rows(batch)
        hidden_TKD = torch.where(seen_T[:, None, None], hidden_TKD, torch.zeros((), dtype=hidden_TKD.dtype, device=self.device))
        context_TD = self._fuse(hidden_TKD)
        context_rope = self._rope(batch.context_positions_T)
        own_rope = self._rope(batch.positions_NB.flatten())
        x_QD = F.embedding(batch.block_token_ids_NB.flatten(), embedding_VD).to(self.dtype)
        for layer, kind in zip(self._layers(), self.shape.layer_types, strict=True):
            key, value = layer.self_attn.key_value(context_TD, context_rope)
            attend = functools.partial(self.kernel.attend, mask=masks[kind])
            x_QD = layer(x_QD, rope=own_rope, context_key_GTC=key, context_value_GTC=value, attend=attend)
        output: torch.Tensor = self.norm(x_QD)
        return output.view(*batch.positions_NB.shape, -1)

    def fused_pass(self, hidden_TKD: torch.Tensor, batch: BlockBatch, embedding_VD: torch.Tensor, masks: Masks) -> torch.Tensor:
        """The same in few large steps (`fused.py`); slot 0, which predicts nothing, is left 0.

        Until backward is over nobody may write to `hidden_TKD`.
        """
        context_TD = fused_norm(fused_context(hidden_TKD, _seen_rows(batch), self.fc.weight), self.hidden_norm)
        blocks, size = batch.positions_NB.shape
        # every slot after the anchor holds the mask token: `make_block_batch` fills blocks so
        tokens_U = torch.cat((batch.block_token_ids_NB[:, 0], batch.block_token_ids_NB[0, 1:2]))
        distinct_UD = F.embedding(tokens_U, embedding_VD).to(self.dtype)
        return fused_layers(
            layers=self._layers(),
            final_norm=self.norm,
            attends=[functools.partial(self.kernel.attend_joined, mask=masks[kind]) for kind in self.shape.layer_types],
            rows=BlockRows(distinct_UD=distinct_UD, num_blocks=blocks, block_size=size),
            context_TD=context_TD,
            context_rope=self._rope(batch.context_positions_T),
            own_rope=self._rope(batch.positions_NB.flatten()),
        )

    def new_context(self) -> DraftContext:
        """An empty context for decoding one sequence."""
        shape = self.shape
        empty = self.fc.weight.new_empty(shape.num_key_value_heads, 0, shape.head_dim)
        return DraftContext(keys=[empty] * shape.num_layers, values=[empty] * shape.num_layers)

    @torch.no_grad()
    def extend_context(self, context: DraftContext, hidden_SKD: torch.Tensor, start_position: int) -> None:
        """Add the target's hidden states of tokens `start_position` to `start_position + S - 1` to a context.

        The context must reach `start_position`; what it held from there on is replaced.
        """
        assert start_position <= context.length, "hidden states of a context come without gaps"
        positions = torch.arange(start_position, start_position + len(hidden_SKD), device=self.device)
        fused, rope = self._fuse(hidden_SKD), self._rope(positions)
        for index, layer in enumerate(self._layers()):
            key, value = layer.self_attn.key_value(fused, rope)
            context.write(layer=index, start=start_position, key_GSC=key, value_GSC=value)
        context.length = start_position + len(hidden_SKD)

    @torch.no_grad()
    def draft(
        self, context: DraftContext, token_ids_B: torch.Tensor, start_position: int, embedding_VD: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states `[B, D]` of one block after the final norm; the context is left as it was.

        `token_ids_B` is the anchor's token, at `start_position`, then mask tokens; a block may be shorter than the trained
        size. Only context before `start_position` is read, and all of it must be there.
        """
        assert context.length >= start_position, "the context ends before the anchor"
        kernel = SdpaAttention()  # one block is no work for flex, and its lengths are not multiples of 128
        spans = self.layer_spans(
            anchors=np.array([start_position]),
            starts=np.array([0]),
            valid=np.array([True]),
            context_tokens=start_position,
            block_size=len(token_ids_B),
        )
        masks = {kind: kernel.mask(seen, device=self.device) for kind, seen in spans.items()}
        rope = self._rope(torch.arange(start_position, start_position + len(token_ids_B), device=self.device))
        x_BD = F.embedding(token_ids_B.to(self.device), embedding_VD).to(self.dtype)
        for index, (layer, kind) in enumerate(zip(self._layers(), self.shape.layer_types, strict=True)):
            key, value = context.keys[index], context.values[index]  # rows from the anchor on are in no span
            attend = functools.partial(kernel.attend, mask=masks[kind])
            x_BD = layer(x_BD, rope=rope, context_key_GTC=key, context_value_GTC=value, attend=attend)
        output: torch.Tensor = self.norm(x_BD)
        return output

    def _layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.layers))

    def _fuse(self, hidden_TKD: torch.Tensor) -> torch.Tensor:
        """Fused context `[T, D]`, the same for every layer."""
        fused: torch.Tensor = self.hidden_norm(self.fc(hidden_TKD.to(self.dtype).flatten(1)))
        return fused

    def _rope(self, positions_R: torch.Tensor) -> Rope:
        shape = self.shape
        return rope_tables(positions_R=positions_R, head_dim=shape.head_dim, theta=shape.rope_theta, dtype=self.dtype)


PASSES: Mapping[str, Callable[..., torch.Tensor]] = {"cpu": DFlashDrafter.module_pass, "cuda": DFlashDrafter.fused_pass}
"""The training pass by kind of device."""


def _seen_rows(batch: BlockBatch) -> torch.Tensor:
    """Bool `[T]`: the context rows that at least one valid anchor sees in a full layer; padding is never among them."""
    edges = torch.zeros(len(batch.context_positions_T) + 1, dtype=torch.int32, device=batch.anchors_N.device)
    valid = batch.anchor_valid_N.to(torch.int32)
    edges.index_add_(0, batch.anchor_start_N, valid)
    edges.index_add_(0, batch.anchors_N, -valid)
    return edges.cumsum(0)[:-1] > 0
