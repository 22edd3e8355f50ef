"""The commands of `dovetail`, by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any, cast

import typer
from typer.main import get_command

from dovetail.cli.benchmark import bench
from dovetail.cli.cache_commands import clear_cache, list_cache, verify_cache
from dovetail.cli.command import command
from dovetail.cli.completion import words_split_at_colons
from dovetail.cli.demonstration import demo
from dovetail.cli.entry_point import FAILURE, SUCCESS, USAGE, write_error
from dovetail.cli.environment_report import info
from dovetail.cli.program_commands import convert, diff_models, fuse_model, inspect_model, why, write_report
from dovetail.cli.tuning_commands import (
    check_plan,
    diff_plans,
    export_store,
    import_into_store,
    show_plan,
    tune_model,
    worker,
)

Commands = dict[str, Callable[..., int | None]]
_LOOK: Commands = {"demo": demo, "info": info, "inspect": inspect_model, "why": why, "diff": diff_models}
_WRITE: Commands = {"fuse": fuse_model, "report": write_report, "convert": convert}
_MEASURE: Commands = {"bench": bench, "tune": tune_model, "worker": worker}
_PANELS = {"Look": _LOOK, "Write": _WRITE, "Measure": _MEASURE}
_GROUPS: dict[str, tuple[str, Commands]] = {
    "plan": ("Plans that `tune` wrote.", {"show": show_plan, "diff": diff_plans, "check": check_plan}),
    "measurements": (
        "Measurements of searches, as files.",
        {"export": export_store, "import": import_into_store},
    ),
    "cache": (
        "The disk cache of compiled code.",
        {"list": list_cache, "clear": clear_cache, "verify": verify_cache},
    ),
}
_EPILOG = (
    "MODEL is zoo:NAME, hf:TYPE (a small one of transformers, random weights), package.module:factory or "
    "path/to/file.py:factory, which is run, or a .pt2 file. "
    "Exit codes: 0 done, 1 something failed or differs, 2 wrong usage, 130 interrupted, 141 closed pipe."
)


def make_application() -> typer.Typer:
    """Return the application; help is drawn with boxes on a terminal only."""
    markup = "rich" if sys.stdout.isatty() else None
    settings = {"help_option_names": ["-h", "--help"]}
    application = typer.Typer(
        name="dovetail",
        help="Operator fusion as a graph-to-graph step of its own for PyTorch.",
        epilog=_EPILOG,
        no_args_is_help=True,
        rich_markup_mode=markup,
        pretty_exceptions_enable=False,
        context_settings=settings,
    )
    application.callback()(_root)
    for panel, commands in _PANELS.items():
        for name, function in commands.items():
            application.command(name, rich_help_panel=panel, context_settings=settings)(command(function))
    for group, (summary, commands) in _GROUPS.items():
        inner = typer.Typer(
            help=summary, no_args_is_help=True, rich_markup_mode=markup, context_settings=settings
        )
        for name, function in commands.items():
            inner.command(name, context_settings=settings)(command(function))
        application.add_typer(inner, name=group, rich_help_panel="Look" if group == "cache" else "Measure")
    return application


def _print_version(asked: bool) -> None:
    if asked:
        print(f"dovetail {version('dovetail')}")
        raise typer.Exit


def _root(
    shows_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


def run_application(arguments: list[str]) -> int:
    """Run the command that arguments name, and return its exit code."""
    streams = sys.stdout, sys.stderr
    try:
        with words_split_at_colons(os.environ):
            code: Any = get_command(make_application()).main(
                arguments, prog_name="dovetail", standalone_mode=False
            )
    except typer.Abort:
        return FAILURE
    except (
        SystemExit
    ) as leaving:  # by completion, or by typer for a closed pipe, whose streams it has wrapped
        if isinstance(leaving.__context__, BrokenPipeError):
            sys.stdout, sys.stderr = streams
            raise leaving.__context__ from None
        return leaving.code if isinstance(leaving.code, int) else FAILURE
    except Exception as error:
        # Typer's errors of usage; their base class has moved between its releases.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(context.get_help() if context is not None else format_message(), file=sys.stderr)
            return USAGE
        path = "dovetail" if context is None else cast("str", context.command_path)
        message = str(format_message())
        write_error(
            f"{message[:1].lower()}{message[1:].rstrip('.?')}{'?' if message.endswith('?') else '.'} Try '{path} --help'."
        )
        return USAGE
    return code if isinstance(code, int) else SUCCESS
