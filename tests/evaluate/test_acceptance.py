"""The path found from one teacher-forced pass is the path that decoding takes, list for list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.config import DrafterShape, TargetInfo
from slipstream.drafter import build_drafter
from slipstream.evaluate.acceptance import DocumentMatches, score_pack, simulate_pack, walk
from slipstream.evaluate.decode import greedy_plain, speculative_decode
from slipstream.evaluate.prompts import answered_document
from slipstream.evaluate.session import TargetSession
from slipstream.evaluate.summary import AcceptancePath
from slipstream.plan.evaluation import plan_validation
from slipstream.target.ends import FrozenEnds

HIDDEN, VOCAB, LAYERS, TAPS, BLOCK, MASK, NEW, PACK = 32, 8, 4, (0, 2), 5, 7, 24, 128
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")


def tiny_shape(layer_types=("full", "full"), **changes):
    fields = {
        "num_layers": len(layer_types),
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "tap_layers": TAPS,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "layer_types": layer_types,
        "sliding_window": 6 if "sliding" in layer_types else None,
        "num_target_layers": LAYERS,
        "initializer_range": 0.3,
    }
    return DrafterShape(**(fields | changes))


def tiny_info(shape):
    return TargetInfo(
        folder=Path("target"),
        model_type="llama",
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        rms_norm_eps=1e-6,
        rope_theta=shape.rope_theta,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        layer_types=("full_attention",) * LAYERS,
        sliding_window=None,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
    )


def the_packages_drafter(drafter):
    """The `dflash` package's model with our drafter's weights and our exported config."""
    from dflash.model import DFlashDraftModel
    from transformers import Qwen3Config

    from slipstream.export.layout import make_config

    config = make_config(shape=drafter.shape, info=tiny_info(drafter.shape), dtype="float32")
    model = DFlashDraftModel(Qwen3Config(**config)).float().eval()
    model.load_state_dict(drafter.state_dict())
    return model


@torch.no_grad()
def captured(target, pack):
    """Hidden states of a pack, each document alone."""
    hidden_TKD = torch.full((pack.capacity_tokens, len(TAPS), HIDDEN), float("nan"))
    for start, end in zip(pack.starts[:-1], pack.starts[1:], strict=True):
        tokens = torch.from_numpy(pack.token_ids[start:end].astype(np.int64))[None]
        states = target(tokens, use_cache=False, output_hidden_states=True).hidden_states
        hidden_TKD[start:end] = torch.stack([states[tap + 1][0] for tap in TAPS], dim=1)
    return hidden_TKD


class Elsewhere(torch.Tensor):
    """A table that says that it lies where the drafter is not, and can be read by index alone."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self):
        return torch.device("meta")


def simulated(target, drafter, prompts, answers, *, new=NEW, pack_anchors=16, elsewhere=False, capture=captured):
    documents = [
        answered_document(document_id=number, prompt_ids=prompt, answer_ids=answer)
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    planned = plan_validation(documents=documents, pack_tokens=PACK, pack_anchors=pack_anchors, block_size=BLOCK)
    embedding_VD = target.get_input_embeddings().weight.detach()
    embedding_VD = embedding_VD.as_subclass(Elsewhere) if elsewhere else embedding_VD
    ends = FrozenEnds(embedding_VD=embedding_VD, head_VD=target.get_output_embeddings().weight)
    paths = {}
    for pack, uses in planned:
        found = simulate_pack(
            drafter=drafter,
            ends=ends,
            shape=drafter.shape,
            hidden_TKD=capture(target, pack),
            pack=pack,
            uses=uses,
            max_lengths={number: len(prompt) + new for number, prompt in enumerate(prompts)},
            chunk_rows=16,
        )
        paths |= {item.document_id: item.path for item in found}
    return [paths[number] for number in range(len(prompts))]


def small_drafter(*, seed, layer_types=("full", "full")):
    return build_drafter(shape=tiny_shape(layer_types), dtype="float32", device="cpu", seed=seed, attention="sdpa")


@pytest.mark.parametrize("layer_types", [("full", "full"), ("sliding", "full")])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "sliding"])
def test_simulation_equals_decoding_equals_the_reference_loop(kind, layer_types, tiny_target, prompts, monkeypatch):
    """16 answers a target, half of them ended by a stop token, half by length: three implementations, one list each."""
    from dflash.model import dflash_generate

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    seen = set()
    for seed in (0, 1):
        target = tiny_target(kind, seed=seed)
        drafter = small_drafter(seed=seed, layer_types=layer_types)
        theirs, session = the_packages_drafter(drafter), TargetSession(target, tap_layers=TAPS)
        for stop in ((), (2,)):
            answers, decoded, reference = [], [], []
            for prompt in prompts:
                limits = {"prompt_ids": prompt, "max_new_tokens": NEW, "stop_token_ids": stop}
                answers.append(greedy_plain(session, **limits).token_ids)
                answer = speculative_decode(session, drafter=drafter, block_size=BLOCK, mask_token_id=MASK, **limits)
                assert answer.token_ids == answers[-1]
                decoded.append(answer.path)
                found = dflash_generate(theirs, target, torch.tensor([prompt]), NEW, list(stop) or None, return_stats=True)
                reference.append(tuple(found.acceptance_lengths))
            assert simulated(target, drafter, prompts, answers) == decoded
            assert [path.lengths for path in decoded] == reference
            seen |= {length for path in decoded for length in path.lengths}
    assert len(seen) > 1, "lengths vary"


@pytest.mark.parametrize("seed", [0, 1])
def test_simulation_equals_decoding_on_a_hybrid(seed, tiny_target, prompts):
    target, drafter = tiny_target("hybrid", seed=seed), small_drafter(seed=seed)
    session = TargetSession(target, tap_layers=TAPS)
    for stop in ((), (2,)):
        limits = {"max_new_tokens": NEW, "stop_token_ids": stop}
        answers = [greedy_plain(session, prompt_ids=prompt, **limits).token_ids for prompt in prompts]
        decoded = [
            speculative_decode(session, drafter=drafter, block_size=BLOCK, mask_token_id=MASK, prompt_ids=prompt, **limits).path
            for prompt in prompts
        ]
        assert simulated(target, drafter, prompts, answers) == decoded


def test_blocks_cut_by_the_length_limit_are_drafted_again(tiny_target, prompts):
    """Without it, some answer among many would differ: a cut bidirectional block is another block."""
    target, drafter = tiny_target("llama"), small_drafter(seed=0)
    session = TargetSession(target, tap_layers=TAPS)
    differing = 0
    for new in range(2, 27, 3):
        limits = {"max_new_tokens": new, "stop_token_ids": ()}
        answers = [greedy_plain(session, prompt_ids=prompt, **limits).token_ids for prompt in prompts]
        decoded = [
            speculative_decode(session, drafter=drafter, block_size=BLOCK, mask_token_id=MASK, prompt_ids=prompt, **limits).path
            for prompt in prompts
        ]
        assert simulated(target, drafter, prompts, answers, new=new) == decoded
        assert simulated(target, drafter, prompts, answers, new=new, elsewhere=True) == decoded
        differing += simulated(target, drafter, prompts, answers, new=new + BLOCK) != decoded
    assert differing > 0


@pytest.mark.parametrize("layer_types", [("full", "full"), ("sliding", "full")])
def test_flex_attention_finds_the_same_paths(layer_types, tiny_target, prompts):
    """What runs on a GPU: its masks are another implementation's, those of cut blocks too."""
    target, paths = tiny_target("llama"), []
    for new in (NEW, 7):
        session = TargetSession(target, tap_layers=TAPS)
        answers = [greedy_plain(session, prompt_ids=p, max_new_tokens=new, stop_token_ids=()).token_ids for p in prompts]
        for attention in ("sdpa", "flex"):
            drafter = build_drafter(shape=tiny_shape(layer_types), dtype="float32", device="cpu", seed=0, attention=attention)
            paths.append(simulated(target, drafter, prompts, answers, new=new, pack_anchors=128))
    assert paths[0] == paths[1]
    assert paths[2] == paths[3]


def test_how_packs_and_uses_are_cut_changes_nothing(tiny_target, prompts):
    target, drafter = tiny_target("llama"), small_drafter(seed=0)
    session = TargetSession(target, tap_layers=TAPS)
    answers = [greedy_plain(session, prompt_ids=p, max_new_tokens=NEW, stop_token_ids=()).token_ids for p in prompts]
    first = simulated(target, drafter, prompts, answers, pack_anchors=16)
    assert simulated(target, drafter, prompts, answers, pack_anchors=128) == first
    alone = [simulated(target, drafter, [prompt], [answer])[0] for prompt, answer in zip(prompts, answers, strict=True)]
    assert alone == first


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_told_and_cost_no_other_document(value, tiny_target, prompts, caplog):
    target, drafter = tiny_target("llama"), small_drafter(seed=0)
    session = TargetSession(target, tap_layers=TAPS)
    answers = [greedy_plain(session, prompt_ids=p, max_new_tokens=NEW, stop_token_ids=()).token_ids for p in prompts]

    def damaged(with_value):
        def capture(target, pack):
            hidden_TKD = captured(target, pack)
            for number in np.flatnonzero(pack.document_ids == 1):
                hidden_TKD[pack.starts[number] : pack.starts[number + 1]] = with_value
            return hidden_TKD

        return capture

    whole = simulated(target, drafter, prompts, answers)
    assert caplog.text == "", "padding is no row"
    found = simulated(target, drafter, prompts, answers, capture=damaged(value))
    assert f"{len(prompts[1]) + len(answers[1])} hidden-state rows are not finite" in caplog.text
    assert [*found[:1], *found[2:]] == [*whole[:1], *whole[2:]]
    assert found == simulated(target, drafter, prompts, answers, capture=damaged(0.0))


def test_answers_of_one_token_take_no_step(tiny_target, prompts):
    target, drafter = tiny_target("llama"), small_drafter(seed=0)
    empty = AcceptancePath(lengths=(), accepted=())
    assert simulated(target, drafter, prompts[:2], [[3], [4]]) == [empty, empty]


def test_an_anchor_that_no_use_covers_is_noticed(tiny_target, prompts):
    target, drafter = tiny_target("llama"), small_drafter(seed=0)
    document = answered_document(document_id=0, prompt_ids=prompts[1], answer_ids=[1] * 20)
    ((pack, uses),) = plan_validation(documents=[document], pack_tokens=PACK, pack_anchors=16, block_size=BLOCK)
    ends = FrozenEnds(embedding_VD=target.get_input_embeddings().weight, head_VD=target.get_output_embeddings().weight)
    arguments = {"drafter": drafter, "ends": ends, "shape": drafter.shape, "pack": pack, "hidden_TKD": captured(target, pack)}
    assert len(uses) == 2
    score_pack(uses=uses, **arguments)
    with pytest.raises(AssertionError, match="every position"):
        score_pack(uses=uses[:1], **arguments)
    with pytest.raises(AssertionError, match="every anchor once"):
        score_pack(uses=[*uses, uses[0]], **arguments)


def matches(match, *, answer_start):
    return DocumentMatches(
        document_id=0,
        row=0,
        answer_start=answer_start,
        token_ids=np.zeros(len(match), dtype=np.int32),
        match_L=np.array(match, dtype=np.int32),
    )


def test_walk_by_hand():
    found = matches([0, 0, 2, 9, 9, 0, 1, 9, 9, 0], answer_start=2)
    path = walk(found, block_size=4, max_length=100, cut_L=np.full(10, 99, dtype=np.int32))  # no block is cut
    # From 2: two stand and one more, to 5; none stands, to 6; one and one, to 8; what is there is cut at the last, 9.
    assert path == AcceptancePath(lengths=(3, 1, 2, 1), accepted=(2, 0, 1, 1))


def test_walk_takes_cut_blocks_near_the_limit() -> None:
    cut_L = np.array([9, 9, 9, 9, 9, 0, 0, 0], dtype=np.int32)
    path = walk(matches([0, 3, 9, 9, 9, 9, 9, 9], answer_start=1), block_size=4, max_length=8, cut_L=cut_L)
    assert path.lengths == (4, 1, 1)
    assert path.accepted == (3, 0, 0)
