"""The real loop against `dflash_generate`, plain decoding, and drafters that always or never agree."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import TargetError
from slipstream.evaluate.decode import greedy_plain, speculative_decode
from slipstream.evaluate.sampling import Sampled, Sampling
from slipstream.evaluate.session import TargetSession

TAPS, BLOCK, MASK, VOCAB, NEW = (0, 2), 5, 7, 8, 24
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")


def speculate(session, drafter, prompt, *, new=NEW, stop=(), chooser=None):
    return speculative_decode(
        session,
        drafter=drafter,
        block_size=BLOCK,
        mask_token_id=MASK,
        prompt_ids=prompt,
        max_new_tokens=new,
        stop_token_ids=stop,
        chooser=chooser,
    )


def plainly(session, prompt, *, new=NEW, stop=()):
    return greedy_plain(session, prompt_ids=prompt, max_new_tokens=new, stop_token_ids=stop)


class Oracle:
    """Drafts what `say(position)` tells: a one-hot of the wanted token through a head that is the identity on it."""

    def __init__(self, session, say, end):
        # The head has more columns than rows here, so its pseudo-inverse gives a hidden state for any wanted logits.
        self.inverse_VD = torch.linalg.pinv(session.head_VD.detach()).T
        self.say, self.end = say, end

    def new_context(self):
        return []

    def extend_context(self, context, hidden_SKD, start_position):
        assert start_position == len(context), "states of the tokens not yet given, and only those"
        context.extend(hidden_SKD)

    def draft(self, context, token_ids_B, start_position, embedding_VD):
        assert len(context) == start_position
        assert token_ids_B[1:].eq(MASK).all()
        assert len(token_ids_B) == min(BLOCK, self.end - start_position), "blocks are cut at the longest answer allowed"
        return self.inverse_VD[torch.tensor([self.say(start_position + slot) for slot in range(len(token_ids_B))])]


def oracle(session, prompt, answer, *, shift=0, new=NEW):
    def say(position):
        return (answer[min(position - len(prompt), len(answer) - 1)] + shift) % VOCAB

    return Oracle(session, say, len(prompt) + new)


@pytest.mark.parametrize("layer_types", [("full_attention",) * 2, ("sliding_attention", "full_attention")])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "sliding"])
def test_lengths_and_text_equal_the_reference_loop(
    kind, layer_types, tiny_target, reference, reference_drafter, prompts, monkeypatch
):
    from dflash.model import dflash_generate

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    target, model = tiny_target(kind), reference(layer_types=layer_types)
    session = TargetSession(target, tap_layers=TAPS)
    seen = set()
    for prompt in prompts:
        stop = plainly(session, prompt).token_ids[NEW // 2]
        for stops in ((), (stop,)):
            theirs = dflash_generate(model, target, torch.tensor([prompt]), NEW, list(stops) or None, return_stats=True)
            ours = speculate(session, reference_drafter(model), prompt, stop=stops)
            assert list(ours.path.lengths) == theirs.acceptance_lengths
            assert list(ours.token_ids) == theirs.output_ids[0, len(prompt) :].tolist()
            assert ours.token_ids == plainly(session, prompt, stop=stops).token_ids
            assert ours.num_replays == 0
            seen |= set(ours.path.lengths)
    assert len(seen) > 2, "the drafter is neither always right nor always wrong"


@pytest.mark.parametrize("kind", ["llama", "sliding", "hybrid"])
@pytest.mark.parametrize("new", [1, 2, 5, 6, 7, NEW])
def test_a_drafter_that_is_always_right_gives_whole_blocks(kind, new, tiny_target, prompts):
    session = TargetSession(tiny_target(kind), tap_layers=TAPS)
    for prompt in prompts:
        plain = plainly(session, prompt, new=new)
        ours = speculate(session, oracle(session, prompt, plain.token_ids, new=new), prompt, new=new)
        left = new - 1
        assert ours.token_ids == plain.token_ids
        assert ours.path.lengths == (BLOCK,) * (left // BLOCK) + ((left % BLOCK,) if left % BLOCK else ())


@pytest.mark.parametrize("kind", ["llama", "sliding", "hybrid"])
def test_a_drafter_that_is_never_right_gives_one_token_a_step(kind, tiny_target, prompts):
    session = TargetSession(tiny_target(kind), tap_layers=TAPS)
    for prompt in prompts:
        plain = plainly(session, prompt)
        ours = speculate(session, oracle(session, prompt, plain.token_ids, shift=1), prompt)
        assert ours.token_ids == plain.token_ids
        assert ours.path == plain.path
        assert ours.num_replays == (NEW - 1 if kind == "hybrid" else 0)


def test_a_stop_token_inside_an_accepted_block_ends_the_answer_there(tiny_target, prompts):
    session = TargetSession(tiny_target("llama"), tap_layers=TAPS)
    whole = plainly(session, prompts[1]).token_ids
    stop = whole[3]
    first = whole.index(stop)
    ours = speculate(session, oracle(session, prompts[1], whole), prompts[1], stop=(stop,))
    assert ours.token_ids == whole[: first + 1]
    assert sum(ours.path.lengths) == first
    assert speculate(session, oracle(session, prompts[1], whole), prompts[1], stop=(whole[0],)).path.lengths == ()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_hybrid_answers_are_the_targets_own(seed, tiny_target, reference, reference_drafter, prompts):
    session = TargetSession(tiny_target("hybrid", seed=seed), tap_layers=TAPS)
    for prompt in prompts:
        ours = speculate(session, reference_drafter(reference(seed=seed)), prompt)
        assert ours.token_ids == plainly(session, prompt).token_ids
        assert ours.num_replays > 0


class CroppingSession(TargetSession):
    """What a loop does that trusts `crop` with a recurrent state."""

    def _croppable(self):
        return True


def test_cropping_alone_is_wrong_on_a_hybrid(tiny_target, reference, reference_drafter, prompts):
    target = tiny_target("hybrid")
    session, naive = TargetSession(target, tap_layers=TAPS), CroppingSession(target, tap_layers=TAPS)
    drafter = reference_drafter(reference())
    wrong = sum(speculate(naive, drafter, prompt).token_ids != plainly(session, prompt).token_ids for prompt in prompts)
    assert wrong == len(prompts)


def test_after_a_rollback_a_hybrid_is_bitwise_where_it_would_be_without(tiny_target, prompts):
    """Keeping 2 of 5 verified tokens leaves every state as running those 2 alone does."""
    target = tiny_target("hybrid")
    block = torch.tensor([1, 4, 2, 6, 3])
    direct, rolled = TargetSession(target, tap_layers=TAPS), TargetSession(target, tap_layers=TAPS)
    with torch.no_grad():
        for session, tokens in ((direct, block[:2]), (rolled, block)):
            session.prefill(prompts[2])
            session.verify(tokens)
            session.keep(2)
        assert torch.equal(direct.verify(block), rolled.verify(block))
    assert (direct.num_replays, rolled.num_replays) == (0, 1)


def test_plain_answers_equal_the_generators(tiny_target, prompts):
    from slipstream.target.generate import greedy_answers

    for kind in ("llama", "hybrid"):
        model = tiny_target(kind)
        session = TargetSession(model, tap_layers=TAPS)
        expected = greedy_answers(model=model, prompts=prompts, max_new_tokens=NEW, stop_token_ids=[2], batch_size=1)
        assert [list(plainly(session, prompt, stop=(2,)).token_ids) for prompt in prompts] == expected


def test_sampled_decoding_draws_what_the_target_would(tiny_target, reference, reference_drafter, prompts):
    """The joint distribution of two tokens over 600 answers against the exact one: chi-square below mean + 4 sigma."""
    target = tiny_target("llama")
    sampling = Sampling(temperature=4.0, top_k=3)
    session = TargetSession(target, tap_layers=TAPS)
    drafter = reference_drafter(reference())
    chooser = Sampled(sampling, generator=torch.Generator().manual_seed(0))
    counts = torch.zeros(VOCAB, VOCAB)
    for _ in range(600):
        first, second = speculate(session, drafter, prompts[1], new=2, chooser=chooser).token_ids
        counts[first, second] += 1
    expected = exact_pairs(target, prompts[1], sampling) * counts.sum()
    assert counts[expected == 0].sum() == 0, "nothing outside the top k"
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)


@torch.no_grad()
def exact_pairs(target, prompt, sampling):
    from slipstream.evaluate.sampling import probabilities

    def following(tokens):
        return probabilities(target(torch.tensor([tokens]), use_cache=False).logits[0, -1:], sampling=sampling)[0]

    first = following(prompt)
    return torch.stack([first[token] * following([*prompt, token]) for token in range(VOCAB)])


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
@pytest.mark.parametrize("way", ["speculative", "plain"])
def test_a_target_that_gives_nan_is_told_of_and_forgotten_with_the_answer(kind, way, tiny_target, prompts):
    target = tiny_target(kind)
    session = TargetSession(target, tap_layers=TAPS)
    prompt = prompts[0]
    answer = plainly(session, prompt).token_ids
    embedding = target.get_input_embeddings().weight.data
    good = embedding[answer[2]].clone()
    embedding[answer[2]] = float("nan")  # met in the middle of the answer at the latest
    told = r"target\.dtype = 'float32': the target gave NaN or Inf in an answer"
    with pytest.raises(TargetError, match=told):
        plainly(session, prompt) if way == "plain" else speculate(session, oracle(session, prompt, answer), prompt)
    embedding[answer[2]] = good
    assert plainly(session, prompt).token_ids == answer


def test_tapped_states_are_looked_at_where_the_logits_are_good(tiny_target, prompts):
    target = tiny_target("llama")
    session = TargetSession(target, tap_layers=TAPS)
    layers = target.model.layers
    layers[TAPS[1] + 1].register_forward_pre_hook(lambda _, inputs: (inputs[0].nan_to_num(), *inputs[1:]))
    layers[TAPS[1]].mlp.down_proj.weight.data[0, 0] = float("nan")
    answer = plainly(session, prompts[0]).token_ids  # reads logits alone
    with pytest.raises(TargetError, match="NaN or Inf"):
        speculate(session, oracle(session, prompts[0], answer), prompts[0])
