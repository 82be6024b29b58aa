"""MkDocs hook: what is made from the code, so that it cannot fall behind it: recipe keys, commands, states, the run folder."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import typer
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from slipstream.cli.main import OWN_OPTIONS, VERBS, app
from slipstream.config.recipe import Recipe
from slipstream.observe.states import LANES, STATES
from slipstream.runfolder import RunFolder

Rows = list[list[str]]


def on_files(files: Files, *, config: Any) -> Files:
    """Add the generated pages to the site."""
    for name, text in (("recipe.md", recipe_page()), ("commands.md", commands_page())):
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **about: Any) -> str:
    """Put generated tables where a page asks for them by a comment."""
    for name, make in (("states", states_table), ("lanes", lanes_table), ("run folder", run_folder_table)):
        mark = f"<!-- table: {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def recipe_page() -> str:
    """A table of keys for each section of the recipe, with type, default and the sentence that stands at the field."""
    parts = [
        "# Every recipe key",
        "A run is one TOML file. Every key below may be changed on the command line as `section.key=value`, `none` takes one "
        "away, and a key that is not here is an error. Made from the classes in `slipstream/config/recipe.py`.",
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
    """Key, type, default, sentence."""
    rows = []
    for name, field in fields.items():
        default = "required" if field.default is PydanticUndefined else f"`{toml(field.default)}`"
        bounds = ", ".join(str(rule) for rule in field.metadata if type(rule).__name__ in ("Ge", "Gt", "Le", "Lt"))
        kind = type_name(field.annotation) + (f"<br><small>{limits(bounds)}</small>" if bounds else "")
        rows.append([f"`{prefix}{name}`", kind, default, field.description or ""])
    return table(["key", "type", "default", "what it is"], rows)


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
    """Every verb with its own help text, and the options that stand before it."""
    group: Any = typer.main.get_command(app)
    parts = [
        "# Every command",
        "What `slipstream VERB --help` prints, made from the same code. A mistake in what was given ends with exit code 2 and "
        "one line that names the value, the rule and the key; a failure with 1; Ctrl-C with 130, SIGTERM with 143.",
        "## slipstream",
        "Options that stand before the verb.",
        options_table(group),
    ]
    named = [*((verb, verb) for verb in VERBS), *((" ".join(words), key) for words, key in OWN_OPTIONS.items())]
    for words, key in named:
        command = group.get_command(None, key)
        given = [shown_name(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
        usage = " ".join(["slipstream", words, *given, "[OPTIONS]"])
        parts += [
            f"## slipstream {words}",
            f"```\n{usage}\n```",
            " ".join((command.help or "").split()),
            options_table(command),
        ]
    return "\n\n".join(parts) + "\n"


def options_table(command: Any) -> str:
    """Argument or option, default, sentence."""
    rows = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        option = parameter.param_type_name == "option"
        names = [*parameter.opts, *parameter.secondary_opts] if option else [shown_name(parameter)]
        rows.append([", ".join(f"`{name}`" for name in names), default_of(parameter), parameter.help or ""])
    return table(["argument or option", "default", "what it is"], rows)


def shown_name(argument: Any) -> str:
    """An argument as its usage line shows it."""
    return argument.metavar or argument.name.upper()


def default_of(parameter: Any) -> str:
    """A default as one would type it; nothing where there is none to name."""
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    value = getattr(parameter.default, "value", parameter.default)
    return "" if value is None or isinstance(value, bool) or callable(value) or parameter.required else f"`{value}`"


def states_table() -> str:
    """Every state, its colours, what kind of time it is and its sentence."""
    rows = []
    for name, state in STATES.items():
        colours = "".join(f'<span class="swatch" style="background:{colour}"></span>' for colour in (state.light, state.dark))
        rows.append([f"{colours} `{name}`", state.kind, state.sentence])
    return table(["state", "kind", "what the worker does"], rows)


def lanes_table() -> str:
    """Every kind of lane."""
    return table(["lane", "what it shows"], [[f"`{name}`", sentence] for name, sentence in LANES.items()])


def run_folder_table() -> str:
    """What lies in a run folder."""
    folder = RunFolder(Path())
    rows = []
    for name, member in vars(RunFolder).items():
        if isinstance(member, property):
            path: Path = getattr(folder, name)
            rows.append([f"`{path.name}{'' if path.suffix else '/'}`", member.__doc__ or ""])
    return table(["name", "what it holds"], rows)


def table(head: list[str], rows: Rows) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines)
