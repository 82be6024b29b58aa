"""From a TOML file and `a.b=c` overrides to a frozen `Recipe`, and back to TOML."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from slipstream.config.recipe import Recipe
from slipstream.errors import RecipeError


def load_recipe(path: str | Path, *, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply overrides such as `plan.epochs=2`, in order.

    Raises `RecipeError` with the key, the value found and the rule.
    """
    file = Path(path)
    try:
        raw = tomllib.loads(file.read_text())
    except OSError as error:
        raise RecipeError(key="recipe", value=str(file), rule=f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(key="recipe", value=str(file), rule=f"is not TOML: {error}") from error
    for override in overrides:
        _apply(raw, override)
    return make_recipe(raw)


def make_recipe(raw: dict[str, Any]) -> Recipe:
    """Validate a nested dict as a recipe. Raises `RecipeError`; an unknown key names the nearest known one."""
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise _first_error(error) from error


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as TOML, every key included; what is none is left out, which reads back as none."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise RecipeError(key=override, value=text, rule="an override is written a.b=c", hint="for example plan.epochs=2")
    place = raw
    for part in parts[:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise RecipeError(key=key, value=text, rule=f"{part} is a value, not a section")
    if text.strip() in ("none", "null"):
        place.pop(parts[-1], None)
        return
    try:
        place[parts[-1]] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        place[parts[-1]] = text.strip()


def _first_error(error: ValidationError) -> RecipeError:
    errors = error.errors()
    first = errors[0]
    parts = _key_parts(first["loc"])
    key = ".".join(parts) or "recipe"
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(parts[-1], _known_keys(parts[:-1]), n=1, cutoff=0.3)
        elsewhere = [name for name in _all_keys() if name.rsplit(".", 1)[-1] == parts[-1]]
        hint = f"did you mean {'.'.join([*parts[:-1], near[0]])}?" if near else ""
        hint = f"it belongs at {elsewhere[0]}" if elsewhere else hint
        return RecipeError(key=key, value=first["input"], rule="no such key", hint=hint)
    if first["type"] == "missing":
        return RecipeError(key=key, value=None, rule="is required and missing", hint="add it to the recipe")
    # A union complains once for each of its members: the key is one, what it may be is all of them.
    rules = dict.fromkeys(
        other["msg"][0].lower() + other["msg"][1:] for other in errors if other["loc"][:2] == first["loc"][:2]
    )
    return RecipeError(key=key, value=first["input"], rule=", or ".join(rules))


def _key_parts(place: Sequence[int | str]) -> list[str]:
    """Keys and indices of an error's place, without pydantic's names of union members, such as `literal['spread']`."""
    return [str(part) for part in place if isinstance(part, int) or str(part).isidentifier()]


def _known_keys(parts: Sequence[str]) -> list[str]:
    model: Any = Recipe
    for part in parts:
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return []
        model = field.annotation
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _all_keys() -> list[str]:
    keys: list[str] = []
    for name, field in Recipe.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += [f"{name}.{key}" for key in inner.model_fields]
        else:
            keys.append(name)
    return keys
