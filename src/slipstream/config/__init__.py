"""Beside the flow: the recipe of a run and what the target's own files say. No torch, no transformers, no datasets.

What flows in: a TOML file and overrides. What flows out: a frozen `Recipe` and a `TargetInfo`.
"""

from slipstream.config.drafter_shape import DrafterShape, resolve_drafter
from slipstream.config.load import dump_recipe, load_recipe, make_recipe
from slipstream.config.recipe import Recipe
from slipstream.config.target_info import TargetInfo, find_target, read_target_info, resolve_mask_token, resolve_taps

__all__ = [
    "DrafterShape",
    "Recipe",
    "TargetInfo",
    "dump_recipe",
    "find_target",
    "load_recipe",
    "make_recipe",
    "read_target_info",
    "resolve_drafter",
    "resolve_mask_token",
    "resolve_taps",
]
