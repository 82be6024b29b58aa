"""`export` and `evaluate` from the command line, on a whole small target: tokenizer, template, weights."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from slipstream.cli.drafter_source import read_drafter
from slipstream.cli.main import app
from slipstream.config import dump_recipe, make_recipe, read_target_info, resolve_drafter
from slipstream.drafter import build_drafter
from slipstream.errors import CheckpointError, UsageError
from slipstream.export.dflash_format import read_dflash
from slipstream.records import Cursor
from slipstream.runfolder import RunFolder
from slipstream.target.fingerprint import fingerprint_target
from slipstream.trainer.checkpoint import Checkpoint, CheckpointIdentity, write_checkpoint
from slipstream.trainer.optim import OptimizerState

SPECIALS = ("<unk>", "<|im_start|>", "<|im_end|>", "<|mask|>")
WORDS = (*SPECIALS, "user", "assistant", *(f"w{i}" for i in range(10)))
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' + m['content'] + ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "target"
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIALS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes, vocab_size=len(WORDS), max_position_embeddings=128, eos_token_id=2, initializer_range=0.3, bos_token_id=None
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run_folder(target, tmp_path_factory):
    """A run with two checkpoints, step 5 the newest, none validated."""
    return make_run(tmp_path_factory.mktemp("runs") / "tiny", target, {3: None, 5: None})


def make_run(path, target, lengths):
    """A run with checkpoints of some steps, each with the acceptance length that validation measured there."""
    folder = RunFolder(path)
    folder.create()
    recipe = make_recipe(
        {
            "name": "tiny",
            "target": {"model": str(target), "num_taps": 2},
            "corpus": {"path": "corpus"},
            "drafter": {"num_layers": 1, "block_size": 4, "mask_token_id": 3, "initializer_range": 0.3},
        }
    )
    folder.recipe.write_text(dump_recipe(recipe))
    info = read_target_info(str(target))
    shape = resolve_drafter(recipe=recipe, info=info)
    fingerprint = fingerprint_target(info)
    identity = CheckpointIdentity.of(recipe=recipe, shape=shape, plan_digest="d", target_fingerprint=fingerprint)
    for step, length in lengths.items():
        state = dict(build_drafter(shape=shape, dtype="float32", device="cpu", seed=step, attention="sdpa").state_dict())
        first, second = ({key: torch.zeros_like(tensor) for key, tensor in state.items()} for _ in range(2))
        optimizer = OptimizerState(master=state, exp_avg=first, exp_avg_sq=second, good_steps=torch.tensor(step))
        cursor = Cursor(step=step, plan_digest="d")
        checkpoint = Checkpoint(cursor=cursor, state=optimizer, counters={}, acceptance_length=length)
        write_checkpoint(checkpoint, folder=folder.checkpoints, identity=identity, versions={})
    return folder


@pytest.fixture
def prompts(tmp_path):
    rows = [[("user", "w1 w2")], [("user", "w3"), ("assistant", "w4")], [("user", "w5 w6 w7")], [("assistant", "w1")]]
    file = tmp_path / "held-out.jsonl"
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in row]}) for row in rows]
    file.write_text("\n".join(lines) + "\n")
    return file


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_drafter_of_a_float8_target_is_of_the_same_target(run_folder, target, tmp_path):
    info, source = read_target_info(str(target)), read_drafter(run_folder.checkpoints / "step-000005")
    replace(source, target_fingerprint=fingerprint_target(info, dtype="float8")).check_target(info)
    with pytest.raises(CheckpointError, match="other weights than the target"):
        replace(source, target_fingerprint="another").check_target(info)


def test_exporting_a_run_that_was_not_validated_takes_the_newest_checkpoint(run_folder, target, tmp_path):
    result = call("export", run_folder.root, "--out", tmp_path / "drafter", "--json")
    assert result.exit_code == 0, result.output
    written = json.loads(result.output)
    assert written["source"].endswith("step-000005")
    assert written["chosen"].startswith("the newest, since none was validated; --checkpoint takes another")
    assert written["largest_difference"] < 1e-4
    shape, state = read_dflash(tmp_path / "drafter")
    kept = read_drafter(run_folder.checkpoints / "step-000005")
    assert shape == kept.shape
    assert all(torch.equal(state[key], tensor.bfloat16()) for key, tensor in kept.state.items())
    older = call("export", run_folder.checkpoints / "step-000003", "--out", tmp_path / "drafter")
    assert older.exit_code == 2
    assert "exists and holds something else" in older.output
    assert call("export", run_folder.checkpoints / "step-000003", "--out", tmp_path / "drafter", "--force").exit_code == 0


LENGTHS = {2: 1.25, 4: 2.5, 6: None, 8: 2.0}
OTHERS = "--checkpoint takes another: step 8 (2.000), step 6 (not validated), step 4 (2.500), step 2 (1.250)"


@pytest.mark.parametrize(
    ("asked", "lengths", "step", "why"),
    [
        (None, LENGTHS, 4, f"the best in validation, acceptance length 2.500; {OTHERS}"),
        ("best", LENGTHS, 4, f"the best in validation, acceptance length 2.500; {OTHERS}"),
        ("newest", LENGTHS, 8, f"the newest; {OTHERS}"),
        ("2", LENGTHS, 2, "as asked"),
        (None, {7: 2.0, 9: 2.0}, 9, "the best in validation, acceptance length 2.000, and the newest; "),
        (None, {7: 2.0}, 7, "the best in validation, acceptance length 2.000, and the newest"),
        (None, {7: None}, 7, "the newest, since none was validated"),
    ],
)
def test_the_best_checkpoint_of_a_run_is_taken_or_the_one_asked_for(asked, lengths, step, why, target, tmp_path):
    found = read_drafter(make_run(tmp_path / "run", target, lengths).root, checkpoint=asked)
    assert found.described.endswith(f"step-{step:06d}")
    assert found.chosen is not None
    assert found.chosen.startswith(why)
    assert len(lengths) > 1 or found.chosen == why


def test_export_says_which_checkpoint_it_took(target, tmp_path):
    run = make_run(tmp_path / "run", target, LENGTHS)
    result = call("export", run.root, "--out", tmp_path / "drafter")
    assert result.exit_code == 0, result.output
    first, second, _ = result.stdout.splitlines()
    assert "step-000004 → " in first
    assert second == f"taken of the run: the best in validation, acceptance length 2.500; {OTHERS}"
    other = call("export", run.root, "--out", tmp_path / "other", "--checkpoint", "8", "--json")
    assert json.loads(other.output)["source"].endswith("step-000008")


@pytest.mark.parametrize("asked", ["3", "latest", "best"])
def test_a_checkpoint_that_is_not_there_is_refused(asked, run_folder, prompts, tmp_path):
    for verb, rest in (("export", ("--out", tmp_path / "drafter")), ("evaluate", ("--prompts", prompts))):
        source = run_folder.checkpoints / "step-000005" if asked == "3" else run_folder.root
        result = call(verb, source, *rest, "--checkpoint", asked)
        assert result.exit_code == 2
        assert result.output.startswith(f"error: --checkpoint = '{asked}': ")
    assert not (tmp_path / "drafter").exists()


def test_what_is_written_follows_the_umask(run_folder, target, tmp_path):
    before = os.umask(0o027)
    try:
        assert call("export", run_folder.root, "--out", tmp_path / "drafter").exit_code == 0
        checkpoint = make_run(tmp_path / "run", target, {1: None}).checkpoints / "step-000001"
    finally:
        os.umask(before)
    files = [*(tmp_path / "drafter").iterdir(), *checkpoint.iterdir()]
    assert len(files) == 6
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o640"}


def test_an_exported_drafter_and_its_checkpoint_measure_the_same(run_folder, target, prompts, tmp_path):
    assert call("export", run_folder.root, "--out", tmp_path / "drafter").exit_code == 0
    options = ("--prompts", prompts, "--max-new-tokens", 20, "--device", "cpu", "--json")
    first = call("evaluate", tmp_path / "drafter", "--target", target, *options, "--bf16-agreement", "--sampled", "--seed", 1)
    assert first.exit_code == 0, first.output
    (report,) = json.loads(first.output)["sets"]
    assert (report["name"], report["prompts"], report["skipped"]) == ("held-out", 3, 1)
    assert report["simulated"] == report["decoded"]
    assert report["equal_paths"] == 3
    assert report["lossless"]["equal"] == 3
    assert report["simulated"]["tau_steps"] >= 1
    assert report["sampled"]["requests"] == 3
    assert 0 < report["bf16_agreement"] <= 1
    assert report["plain_tokens_per_second"] > 0
    second = call("evaluate", run_folder.root, *options)
    assert second.exit_code == 0, second.output
    (again,) = json.loads(second.output)["sets"]
    assert again["simulated"] == report["simulated"]
    assert again["sampled"] is None
    assert again["bf16_agreement"] is None


def test_table_names_both_means_and_the_limit_holds(run_folder, prompts):
    result = call("evaluate", run_folder.root, "--prompts", prompts, "--limit", 2, "--max-new-tokens", 6, "--device", "cpu")
    assert result.exit_code == 0, result.output
    for text in ("τ simulated", "τ decoded", "by request", "held-out", "2 equal", "tokens/s"):
        assert text in result.output


def test_an_answer_that_is_not_the_targets_own_fails_the_command(run_folder, prompts, monkeypatch):
    from slipstream.evaluate import measure

    monkeypatch.setattr(measure, "top_gap_of", lambda _target: lambda _tokens: 1.0)
    real = measure.speculative_decode

    def wrong(session, **options):
        import dataclasses

        answer = real(session, **options)
        return dataclasses.replace(answer, token_ids=(*answer.token_ids[:-1], (answer.token_ids[-1] + 1) % len(WORDS)))

    monkeypatch.setattr(measure, "speculative_decode", wrong)
    result = call("evaluate", run_folder.root, "--prompts", prompts, "--limit", 1, "--max-new-tokens", 4, "--device", "cpu")
    assert result.exit_code == 1
    assert "1 answers with the drafter differ" in result.output


@pytest.mark.parametrize("option", ["--temperature", "--top-p", "--top-k", "--seed"])
def test_options_of_sampling_need_it(option, run_folder, prompts):
    result = call("evaluate", run_folder.root, "--prompts", prompts, option, 1)
    assert result.exit_code == 2
    assert f"{option} = 1" in result.output
    assert "without --sampled" in result.output


def test_an_export_needs_its_target_named(run_folder, prompts, tmp_path):
    assert call("export", run_folder.root, "--out", tmp_path / "drafter").exit_code == 0
    for arguments in (("evaluate", tmp_path / "drafter", "--prompts", prompts), ("export", tmp_path / "drafter", "--out", "x")):
        result = call(*arguments)
        assert result.exit_code == 2
        assert "--target" in result.output


def test_another_target_is_refused(run_folder, target, tmp_path):
    other = tmp_path / "other"
    torch.manual_seed(1)
    LlamaForCausalLM.from_pretrained(target).apply(_redraw).save_pretrained(other)
    result = call("export", run_folder.root, "--target", other, "--out", tmp_path / "drafter")
    assert result.exit_code == 2
    assert "other weights" in result.output
    assert not (tmp_path / "drafter").exists()


def _redraw(module):
    if isinstance(module, torch.nn.Linear):
        torch.nn.init.normal_(module.weight)


def test_folders_that_hold_no_drafter_are_refused(tmp_path):
    with pytest.raises(UsageError, match="neither an exported drafter nor a checkpoint nor a run"):
        read_drafter(tmp_path)
    RunFolder(tmp_path).create()
    with pytest.raises(CheckpointError, match="without a checkpoint"):
        read_drafter(tmp_path)


def test_an_unknown_dtype_is_refused(run_folder, tmp_path):
    result = call("export", run_folder.root, "--out", tmp_path / "drafter", "--dtype", "float16")
    assert result.exit_code == 2
    assert "--dtype" in result.output
