"""MkDocs hook: the pages that are made from the code, so that they cannot fall behind it: recipe keys and commands."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

import typer
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from slipstream.config.recipe import Recipe


def on_files(files: Files, *, config: Any) -> Files:
    """Add the generated pages to the site."""
    for name, text in (("recipe.md", recipe_page()), ("commands.md", commands_page())):
        files.append(File.generated(config, name, content=text))
    return files


def recipe_page() -> str:
    """A table of keys for each section of the recipe, with type, default and the sentence that stands at the field."""
    parts = [
        "# Every recipe key",
        "A run is one TOML file. Every key below may be changed on the command line as `section.key=value`; a key that is not "
        "here is an error. Made from the classes in `slipstream/config/recipe.py`.",
        "## The run itself",
    ]
    own = {name: field for name, field in Recipe.model_fields.items() if section_of(field) is None}
    parts.append(keys_table(own, prefix=""))
    for name, field in Recipe.model_fields.items():
        section = section_of(field)
        if section is not None:
            parts += [f"## [{name}]", (section.__doc__ or "").strip(), keys_table(section.model_fields, prefix=f"{name}.")]
    return "\n\n".join(parts) + "\n"


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section class of a field, if it is a section."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def keys_table(fields: dict[str, FieldInfo], *, prefix: str) -> str:
    """Markdown rows: key, type, default, sentence."""
    rows = ["| key | type | default | what it is |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "required" if field.default is PydanticUndefined else f"`{toml(field.default)}`"
        sentence = " ".join((field.description or "").split()).replace("|", "\\|")
        bounds = ", ".join(str(rule) for rule in field.metadata if type(rule).__name__ in ("Ge", "Gt", "Le", "Lt"))
        kind = type_name(field.annotation) + (f"<br><small>{limits(bounds)}</small>" if bounds else "")
        rows.append(f"| `{prefix}{name}` | {kind} | {default} | {sentence} |")
    return "\n".join(rows)


def limits(text: str) -> str:
    """Pydantic's bounds as signs."""
    for word, sign in (("Ge(ge=", "≥ "), ("Gt(gt=", "> "), ("Le(le=", "≤ "), ("Lt(lt=", "< ")):
        text = text.replace(word, sign)
    return text.replace(")", "")


def toml(value: Any) -> str:
    """A default as one writes it in the recipe."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(toml(entry) for entry in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def type_name(kind: Any) -> str:
    """A type in the words of TOML."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(f'`"{choice}"`' if isinstance(choice, str) else f"`{toml(choice)}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(one) for one in arguments if one is not type(None))
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    return {str: "text", int: "integer", float: "number", bool: "`true` or `false`"}.get(kind, str(kind))


def commands_page() -> str:
    """Every verb with its own help text."""
    from slipstream.cli.main import app

    group: Any = typer.main.get_command(app)
    parts = ["# Every command", "What `slipstream VERB --help` prints, made from the same code."]
    for name, command in group.commands.items():
        rows = ["| argument or option | what it is |", "|---|---|"]
        for parameter in command.params:
            shown = " ".join(parameter.opts) if parameter.param_type_name == "option" else parameter.name.upper()
            sentence = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
            if parameter.name != "help":
                rows.append(f"| `{shown}` | {sentence} |")
        parts += [f"## slipstream {name}", " ".join((command.help or "").split()), "\n".join(rows)]
    return "\n\n".join(parts) + "\n"
