"""Where children keep compiled kernels and the results of tuning: named, by model of GPU, and the user's own wishes first."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from slipstream.launch.kernel_cache import cache_settings, tuned_kernels


def test_both_folders_are_made_for_each_model_of_gpu(tmp_path: Path) -> None:
    settings = cache_settings(environ={"XDG_CACHE_HOME": str(tmp_path)}, gpu_name="NVIDIA H200")
    place = tmp_path / "slipstream/kernels/nvidia-h200"
    assert settings == {
        "TRITON_CACHE_AUTOTUNING": "1",
        "TRITON_CACHE_DIR": str(place / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
    }
    assert (place / "triton").is_dir()
    assert (place / "inductor").is_dir()
    other = cache_settings(environ={"XDG_CACHE_HOME": str(tmp_path)}, gpu_name="NVIDIA H100 80GB HBM3")
    assert other["TRITON_CACHE_DIR"] != settings["TRITON_CACHE_DIR"]
    assert "/gpu/" in cache_settings(environ={"XDG_CACHE_HOME": str(tmp_path)}, gpu_name=None)["TRITON_CACHE_DIR"]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"TRITON_CACHE_AUTOTUNING": "0"}, {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}),
        ({"TRITON_CACHE_DIR": "own"}, {"TRITON_CACHE_AUTOTUNING", "TORCHINDUCTOR_CACHE_DIR"}),
        ({"TRITON_HOME": "own"}, {"TRITON_CACHE_AUTOTUNING", "TORCHINDUCTOR_CACHE_DIR"}),
        ({"TORCHINDUCTOR_CACHE_DIR": "own"}, {"TRITON_CACHE_AUTOTUNING", "TRITON_CACHE_DIR"}),
    ],
)
def test_what_the_user_set_stays(tmp_path: Path, given: dict[str, str], left: set[str]) -> None:
    assert set(cache_settings(environ={"XDG_CACHE_HOME": str(tmp_path), **given}, gpu_name="x")) == left


def test_where_no_folder_can_be_made_torch_s_own_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        settings = cache_settings(environ={"XDG_CACHE_HOME": str(tmp_path / "file")}, gpu_name="x")
    assert settings == {"TRITON_CACHE_AUTOTUNING": "1"}
    assert "kept where torch puts them" in caplog.text


def test_results_are_counted_in_the_folders(tmp_path: Path) -> None:
    assert tuned_kernels({}) == 0
    environ = cache_settings(environ={"XDG_CACHE_HOME": str(tmp_path)}, gpu_name="x")
    for variable, name in (("TRITON_CACHE_DIR", "k.autotune.json"), ("TORCHINDUCTOR_CACHE_DIR", "k.best_config")):
        folder = Path(environ[variable]) / "ab"
        folder.mkdir()
        (folder / name).write_text("{}")
        (folder / "k.json").write_text("{}")
    assert tuned_kernels(environ) == 2
