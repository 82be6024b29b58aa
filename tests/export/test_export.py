"""A folder gets its name only when it was read back and computes the same; warm starts are refused by name."""

from __future__ import annotations

import builtins
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slipstream.drafter import build_drafter
from slipstream.errors import ExportError
from slipstream.export import verify as verify_module
from slipstream.export.dflash_format import export_dflash, read_dflash
from slipstream.export.verify import verify_export
from slipstream.export.warm_start import SAME, read_warm_start


def accept(_folder):
    """Layout tests need no second reading."""


@pytest.fixture
def exported(tmp_path, shape, info, state_of):
    def export(*, name="drafter", verify=accept, seed=0, shape=shape, info=info, **options):
        state = options.pop("state", None) or state_of(shape, seed=seed)
        out = tmp_path / name
        return export_dflash(drafter_state=state, shape=shape, info=info, out=out, verify=verify, **options)

    return export


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("types", [("full", "full"), ("sliding", "sliding"), ("sliding", "full")])
def test_round_trip_through_the_dflash_package(types, dtype, exported, shape_with, state_of, ends):
    """Same logits within 1e-4 of the largest and the same argmax in every slot, in training and in decode mode."""
    shape = shape_with(layer_types=types, sliding_window=100 if "sliding" in types else None)
    found = []
    folder = exported(shape=shape, dtype=dtype, verify=lambda part: found.append(verify_export(part, **ends)))
    assert found[0].slots == (5 if "sliding" in types else 4) * (shape.block_size - 1)
    assert found[0].largest_difference < 1e-4
    read_shape, state = read_dflash(folder)
    assert read_shape == shape
    for key, tensor in state_of(shape).items():
        assert torch.equal(state[key], tensor.to(getattr(torch, dtype)))
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    drafter = build_drafter(shape=shape, dtype="float32", device="cpu", seed=9, attention="sdpa")
    drafter.load_state_dict(state)


def test_folder_holds_config_weights_and_command_lines(exported):
    folder = exported(target_name="org/target")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    readme = (folder / "README.md").read_text()
    assert '"num_speculative_tokens": 7' in readme
    assert "--speculative-num-draft-tokens 8" in readme
    assert "vllm serve org/target" in readme
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"], "no temporary folder is left"


@pytest.mark.parametrize("fields", [{"rope_theta": 10000.0}, {"rms_norm_eps": 0.1}])
def test_verification_finds_a_drafter_that_computes_otherwise(fields, exported, shape_with, ends, monkeypatch):
    """The folder says one thing, our drafter does another: what a wrong writer would look like."""
    folder = exported()
    theirs = verify_module._load_theirs(folder)
    monkeypatch.setattr(verify_module, "_load_theirs", lambda _folder: theirs)
    other = shape_with(**fields)
    monkeypatch.setattr(verify_module, "build_drafter", lambda **options: build_drafter(**(options | {"shape": other})))
    with pytest.raises(ExportError, match=r"dflash package"):
        verify_export(folder, **ends)


def test_verification_reaches_beyond_the_window(exported, shape_with, ends, monkeypatch):
    """A window off by one shows only where it leaves context out."""
    folder = exported(shape=shape_with(layer_types=("sliding", "full"), sliding_window=100))
    theirs = verify_module._load_theirs(folder)
    monkeypatch.setattr(verify_module, "_load_theirs", lambda _folder: theirs)
    other = shape_with(layer_types=("sliding", "full"), sliding_window=101)
    monkeypatch.setattr(verify_module, "build_drafter", lambda **options: build_drafter(**(options | {"shape": other})))
    with pytest.raises(ExportError, match="dflash package"):
        verify_export(folder, **ends)


def test_verification_finds_swapped_taps(exported, shape, ends):
    """Columns of the fusion layer in another order than the taps: every name and shape is right."""
    folder = exported()
    state = load_file(folder / "model.safetensors")
    weight = state["fc.weight"].clone()
    theirs = verify_module._load_theirs(folder)
    state["fc.weight"] = torch.cat((weight[:, 32:64], weight[:, :32], weight[:, 64:]), dim=1)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_module, "_load_theirs", lambda _folder: theirs)
        with pytest.raises(ExportError, match="differ from ours"):
            verify_export(folder, **ends)


def test_a_failed_verification_leaves_nothing(exported, tmp_path):
    def refuse(_folder):
        raise ExportError(key="logits", value=1.0, rule="are apart")

    with pytest.raises(ExportError, match="are apart"):
        exported(verify=refuse)
    assert list(tmp_path.iterdir()) == []


def test_without_the_dflash_package_nothing_is_exported(exported, ends, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("dflash"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ExportError, match="pip install --no-deps dflash"):
        exported(verify=lambda part: verify_export(part, **ends))
    assert list(tmp_path.iterdir()) == []


def test_the_same_again_is_fine_and_another_is_refused(exported, tmp_path):
    folder = exported()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    exported()
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ExportError, match="exists and holds something else"):
        exported(seed=1)
    _, kept = read_dflash(folder)
    exported(seed=1, force=True)
    _, replaced = read_dflash(folder)
    assert not torch.equal(kept["fc.weight"], replaced["fc.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_force_does_not_replace_what_is_no_drafter(exported, tmp_path):
    mine = tmp_path / "drafter" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("years of work")
    for force in (False, True):
        with pytest.raises(ExportError, match="--out"):
            exported(force=force)
    assert mine.read_text() == "years of work"


def test_an_empty_folder_is_filled(exported, tmp_path):
    (tmp_path / "drafter").mkdir()
    assert (exported() / "config.json").is_file()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size": 64}, "hidden_size"),
        ({"vocab_size": 100}, "vocab_size"),
        ({"num_layers": 9}, "num_target_layers"),
        ({"max_position_embeddings": 1024}, "max_position_embeddings"),
    ],
)
def test_a_drafter_of_another_target_is_refused(changes, key, exported, info_with):
    with pytest.raises(ExportError, match=key):
        exported(info=info_with(**changes))


def test_not_finite_weights_are_not_exported(exported, shape, state_of, tmp_path):
    state = {name: tensor.clone() for name, tensor in state_of(shape).items()}
    state["norm.weight"][0] = float("nan")
    with pytest.raises(ExportError, match=r"norm\.weight.*not finite"):
        exported(state=state)
    state["norm.weight"][0] = 3.4e38  # finite in fp32, but rounds to infinity in bfloat16
    with pytest.raises(ExportError, match=r"norm\.weight.*not finite"):
        exported(state=state)
    assert list(tmp_path.iterdir()) == []


def test_views_of_one_flat_buffer_are_exported(exported, shape, state_of):
    """As the trainer holds them; overlapping ones too, which safetensors refuses to write."""
    state = state_of(shape)
    same = state["layers.0.input_layernorm.weight"]
    state = {key: same if tensor.shape == same.shape else tensor for key, tensor in state.items()}
    _, read = read_dflash(exported(state=state, dtype="float32"))
    assert torch.equal(read["norm.weight"], same)


@pytest.mark.parametrize("damage", ["no config", "no weights", "cut weights", "no metadata", "no json"])
def test_damaged_folders_are_refused(damage, exported):
    folder = exported()
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "no config":
        config.unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "no metadata":
        save_file(load_file(weights), weights)
    else:
        config.write_text("{")
    with pytest.raises(ExportError, match=r"config\.json|model\.safetensors"):
        read_dflash(folder)


def test_warm_start_gives_the_tensors(exported, shape, state_of):
    found = read_warm_start(exported(dtype="float32"), shape=shape)
    assert all(torch.equal(found[key], tensor) for key, tensor in state_of(shape).items())


OTHER = {
    "tap_layers": (1, 3, 6),
    "block_size": 16,
    "mask_token_id": 4,
    "layer_types": ("full", "sliding"),
    "sliding_window": 20,
    "num_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 97,
    "num_target_layers": 9,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize("field", SAME)
def test_warm_start_of_another_drafter_is_refused(field, exported, shape_with):
    with pytest.raises(ExportError, match=rf"{field} = .*this run has"):
        read_warm_start(exported(), shape=shape_with(**{field: OTHER[field]}))


def test_warm_start_ignores_what_fixes_no_weight(exported, shape_with):
    read_warm_start(exported(), shape=shape_with(initializer_range=0.5, max_position_embeddings=99))
