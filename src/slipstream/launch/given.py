"""What a run is given, looked at before anything loads: target, corpus, validation prompts, a drafter to start from.

Torch-free. Each refusal carries the value, the rule and the key.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from slipstream.config import DrafterShape, Recipe, TargetInfo, find_target, read_target_info
from slipstream.corpus.meta import CorpusMeta, check_sizes, read_meta, template_fingerprint, tokenizer_fingerprint
from slipstream.corpus.sources import read_conversations
from slipstream.errors import CorpusError, PreflightError
from slipstream.evaluate.prompts import prompt_messages
from slipstream.launch.weight_headers import read_header
from slipstream.plan.weights import count_by_config

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
TARGET_JSON = ("config.json", "generation_config.json", "tokenizer_config.json", INDEX_FILE)

EXPORTED: Mapping[str, str] = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "num_target_layers": "num_target_layers",
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "tap_layers": "target_layer_ids",
}
"""Fields of a drafter's shape, and the keys of an exported `config.json` (or its `dflash_config`) that must agree."""

log = logging.getLogger(__name__)


def read_target(recipe: Recipe) -> TargetInfo:
    """The target's dimensions, once its folder is known to be whole: JSON that reads, every weight file at its length."""
    folder = find_target(recipe.target.model)
    if not (folder / "tokenizer.json").is_file():
        raise _refused("target.model", str(folder), "has no tokenizer.json", "a fast tokenizer is needed")
    contents = {name: _json_table(folder / name, key="target.model") for name in TARGET_JSON if (folder / name).is_file()}
    try:
        info = read_target_info(recipe.target.model, weights=recipe.target.weights)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise _refused("target.model", str(folder / "config.json"), f"holds a value that cannot be: {error}") from error
    if recipe.target.weights == "saved":
        _check_weight_files(folder, index=contents.get(INDEX_FILE))
    else:
        _check_random(folder, info=info)
    if recipe.target.packing == "packed" and info.is_hybrid:
        raise PreflightError(
            key="target.packing",
            value="packed",
            rule="this target's linear-attention layers would carry their state from one document to the next",
            hint='use "auto" or "padded"',
        )
    return info


def _check_weight_files(folder: Path, *, index: dict[str, Any] | None) -> None:
    weight_map = {"": WEIGHTS_FILE} if index is None else index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _refused("target.model", str(folder / INDEX_FILE), "has no weight_map", "download or copy it again")
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise PreflightError(
            key="target.model",
            value=str(folder),
            rule=f"lacks {len(missing)} of {len(names)} weight files, first {missing[0]}",
            hint="safetensors weights are needed; finish the download or convert them",
        )
    for name in names:
        read_header(folder / name, key="target.model")


def _check_random(folder: Path, *, info: TargetInfo) -> None:
    """A target with experts could not be priced; every other one is made up, and the run says so before anything else."""
    if count_by_config(info) is None:
        raise _refused("target.weights", "random", f"{folder / 'config.json'} names experts, whose weights cannot be counted")
    log.warning(
        'target.weights = "random": the weights of %s are made up. This rehearses a placement; its drafter is worthless',
        folder,
    )


def read_corpus(*, recipe: Recipe, info: TargetInfo, shape: DrafterShape) -> CorpusMeta:
    """What the corpus says of itself, once it is whole, belongs to this target and holds something to train on."""
    corpus = read_meta(Path(recipe.corpus.path))
    check_sizes(folder=recipe.corpus.path, meta=corpus)
    _check_same_tokens(recipe=recipe, info=info, corpus=corpus)
    if not corpus.num_documents:
        raise _refused("corpus.path", recipe.corpus.path, "holds no document", "look at its rejects: slipstream inspect")
    if not corpus.num_anchors:
        raise PreflightError(
            key="corpus.path",
            value=recipe.corpus.path,
            rule=f"has no place for a block in {corpus.num_documents} documents: two supervised tokens in a row are needed",
            hint="conversations need answers of two tokens or more",
        )
    if corpus.contains_token(shape.mask_token_id):
        raise PreflightError(
            key="drafter.mask_token_id",
            value=shape.mask_token_id,
            rule="occurs in the corpus, so a drafted slot could not be told from a real token",
            hint="take a token that no conversation contains",
        )
    _check_lengths(recipe=recipe, info=info, corpus=corpus)
    return corpus


def check_validation(*, recipe: Recipe, info: TargetInfo) -> None:
    """Refuse validation prompts that cannot be read, hold no user turn, or leave the target no position for a prompt."""
    prompts, section = recipe.validation.prompts, recipe.validation
    if prompts is None:
        return
    if not Path(prompts).is_file():
        raise _refused("validation.prompts", prompts, "is not a file", "a JSONL of conversations, or leave it out")
    if section.max_new_tokens >= info.max_position_embeddings:
        raise PreflightError(
            key="validation.max_new_tokens",
            value=section.max_new_tokens,
            rule=f"leaves no room for a prompt in the target's {info.max_position_embeddings} positions",
            hint="lower it",
        )
    usable = rows = 0
    try:
        for conversation in islice(read_conversations([Path(prompts)]), section.max_prompts):
            rows += 1
            usable += bool(prompt_messages(conversation.messages))
    except CorpusError as error:
        raise _refused("validation.prompts", prompts, f"{error.key}: {error.value}: {error.rule}", error.hint) from error
    if not usable:
        raise _refused("validation.prompts", prompts, f"holds no conversation with a user turn ({rows} rows read)")


def check_warm_start(*, recipe: Recipe, shape: DrafterShape) -> None:
    """Refuse a drafter to start from that is damaged or of another shape. Layer masks and rotation are compared at loading."""
    folder, key = recipe.drafter.warm_start, "drafter.warm_start"
    if folder is None:
        return
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise _refused(key, folder, "has no config.json", "an exported drafter folder")
    config = _json_table(file, key=key)
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, dict) else {}
    for name, exported in EXPORTED.items():
        found: Any = nested.get(exported, config.get(exported))
        wanted = getattr(shape, name)
        if found != (list(wanted) if isinstance(wanted, tuple) else wanted):
            rule = f"its {exported} is {found}, this recipe's {name} is {wanted}"
            raise _refused(key, folder, rule, "make the recipe equal to the drafter it starts from")
    shapes = read_header(Path(folder) / WEIGHTS_FILE, key=key)
    found = sum(math.prod(size) for size in shapes.values())
    if found != shape.num_parameters:
        rule = f"holds {found:,} weights in {len(shapes)} tensors, this recipe's drafter has {shape.num_parameters:,}"
        raise _refused(key, str(Path(folder) / WEIGHTS_FILE), rule, "export it again")


def _check_same_tokens(*, recipe: Recipe, info: TargetInfo, corpus: CorpusMeta) -> None:
    pairs: list[tuple[str, str, Callable[[Path], str]]] = [
        ("tokenizer", corpus.tokenizer_fingerprint, tokenizer_fingerprint),
        ("chat template", corpus.template_fingerprint, template_fingerprint),
    ]
    again = f"prepare it again: slipstream prepare … --target {recipe.target.model}"
    for what, recorded, fingerprint in pairs:
        if recorded != fingerprint(info.folder):
            rule = f"was prepared with another {what} than that of target.model ({recipe.target.model})"
            raise _refused("corpus.path", recipe.corpus.path, rule, again)
    outside = [token for token in range(info.vocab_size, 8 * len(corpus.token_present)) if corpus.contains_token(token)]
    if outside:
        rule = f"holds token {outside[-1]}, target.model ({recipe.target.model}) has {info.vocab_size}"
        raise _refused("corpus.path", recipe.corpus.path, rule, again)


def _check_lengths(*, recipe: Recipe, info: TargetInfo, corpus: CorpusMeta) -> None:
    room, positions = recipe.plan.pack_tokens, info.max_position_embeddings
    if min(corpus.max_tokens, room) > positions:
        raise PreflightError(
            key="corpus.path",
            value=recipe.corpus.path,
            rule=f"its longest document has {corpus.max_tokens} tokens, the target has {positions} positions",
            hint=f"prepare it with --max-tokens {positions}, or lower plan.pack_tokens to that",
        )
    if corpus.max_tokens > room:
        log.warning(
            "the longest document has %d tokens, plan.pack_tokens is %d: documents that do not fit are left out and counted "
            "(slipstream plan shows how many)",
            corpus.max_tokens,
            room,
        )


def _json_table(file: Path, *, key: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(key, str(file), f"cannot be read as JSON: {error}", "download or copy it again") from error
    if not isinstance(content, dict):
        raise _refused(key, str(file), f"is a JSON {type(content).__name__}, not a table", "download or copy it again")
    return content


def _refused(key: str, value: object, rule: str, hint: str = "") -> PreflightError:
    return PreflightError(key=key, value=value, rule=rule, hint=hint)
