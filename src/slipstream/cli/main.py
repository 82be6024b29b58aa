"""The `slipstream` command: finds the verb, sets up logging, and turns our errors into one line and an exit code.

A verb's module is imported when the verb is asked for, its heavy imports when it runs: `--help` stays under half a second.
"""

from __future__ import annotations

import importlib
import logging
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import slipstream
from slipstream.errors import SlipstreamError
from slipstream.launch.signals import sigterm_raises

VERBS = (
    *("demo", "prepare", "regenerate", "inspect", "plan", "check", "train", "watch", "status", "stop", "logs", "report"),
    *("evaluate", "export", "bench"),
)
"""In the order that `--help` shows them: `slipstream.cli.<verb>` holds one function of that name."""

OWN_OPTIONS = {("bench", "replays"): "bench_replays"}
"""Verbs with a word behind them that share no option with the verb: a module and a function of their own."""


class _Terminated(BaseException):
    """SIGTERM came. Like KeyboardInterrupt it is nobody's error, and passes through whoever gives back a terminal or a file."""


class VerbGroup(TyperGroup):
    """Makes a verb's command on demand, and is the border where our exceptions end."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All verbs; nothing is imported for it."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of one verb, or none when there is no such verb."""
        if cmd_name not in (*VERBS, *OWN_OPTIONS.values()):
            return None
        function = getattr(importlib.import_module(f"slipstream.cli.{cmd_name}"), cmd_name)
        verb = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        verb.command(cmd_name)(function)
        return typer.main.get_command(verb)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments begin with, its name, and the rest of them."""
        name = OWN_OPTIONS.get((args[0], args[1])) if len(args) > 1 else None
        if name is None:
            return super().resolve_command(ctx, args)
        return " ".join(args[:2]), self.get_command(ctx, name), args[2:]

    def invoke(self, ctx: Any) -> Any:
        """Run the verb. Ours end with `error: …` on stderr and their exit code: 2 for what the user gave, 1 for what failed.

        Ctrl-C ends with 130, SIGTERM with 143 where the verb has no way of its own with it; others stay tracebacks.
        """
        try:
            with sigterm_raises(_Terminated):
                return super().invoke(ctx)
        except SlipstreamError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as interrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from interrupt
        except _Terminated as terminated:
            typer.echo("terminated", err=True)
            raise typer.Exit(143) from terminated


app = typer.Typer(cls=VerbGroup, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"slipstream {slipstream.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Log more; twice for everything.")] = 0,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Train DFlash drafters: from conversations to a drafter that serving engines load."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("slipstream").setLevel(level)


def run() -> None:
    """Entry point of the installed command."""
    app()


if __name__ == "__main__":
    run()
