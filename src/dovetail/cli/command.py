"""What all commands have in common: the options of a model, `--json`, `--traceback`, and errors in one line."""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from dovetail.cli.completion import complete_backend, complete_model, complete_rules
from dovetail.cli.console import Console
from dovetail.cli.entry_point import (
    FAILURE,
    INTERRUPTED,
    SUCCESS,
    USAGE,
    UnwritableStdout,
    joined_lines,
    write_error,
)
from dovetail.cli.model_source import BrokenModel, ModelSource
from dovetail.errors import (
    DovetailError,
    InvalidArgument,
    InvalidFile,
    RuleError,
    StoreError,
    UnknownNode,
    UnknownPart,
    UnknownRegion,
)
from dovetail.ir.text_tables import cut

_WRONG_USAGE = (
    InvalidArgument,
    InvalidFile,
    RuleError,
    StoreError,
    UnknownNode,
    UnknownPart,
    UnknownRegion,
    OSError,
    ModuleNotFoundError,
)
"""Errors of what a command was given, not of what it did."""

_LONGEST = 600
_MODEL = "Model"
_OUTPUT = "Output"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="zoo:NAME, hf:TYPE, package.module:factory, path/to/file.py:factory, or a .pt2 file.",
        autocompletion=complete_model,
        show_default=False,
    ),
]
BackendNames = Annotated[
    list[str] | None,
    typer.Option("--backend", "-b", metavar="NAME", help="A backend; may be repeated.", autocompletion=complete_backend),
]  # fmt: skip
RuleNames = Annotated[
    list[str] | None,
    typer.Option(
        "--rules",
        metavar="RULES",
        help="default, library, groups, repeats, siblings, a set or rule of the library, or module:name; may be repeated.",
        autocompletion=complete_rules,
    ),
]


def _option(kind: Any, *names: str, default: Any = None, panel: str | None = None, **details: Any) -> Any:
    """Return a keyword of a command's signature."""
    annotation = Annotated[kind, typer.Option(*names, rich_help_panel=panel, **details)]
    name = names[0].lstrip("-").replace("-", "_")
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_MODEL_OPTIONS = {
    "arg": _option(
        list[str] | None, "--arg", metavar="KEY=VALUE", panel=_MODEL,
        help="Keyword of the factory, or of the zoo's `build`; may be repeated.",
    ),
    "config": _option(
        list[str] | None, "--config", metavar="KEY=VALUE", panel=_MODEL,
        help="Field of the configuration of hf:TYPE; may be repeated.",
    ),
    "input": _option(
        list[str] | None, "--input", metavar="[NAME=]SHAPE[:DTYPE[:BOUND]]", panel=_MODEL,
        help="Random input, such as 1x3x224x224, 2x8:int64:1000 or mask=2x8:bool; may be repeated.",
    ),
    "device": _option(str | None, "--device", metavar="DEVICE", panel=_MODEL, help="Where the model and its inputs are put."),
    "train": _option(bool, "--train", default=False, panel=_MODEL, help="Leave the model in train mode."),
}  # fmt: skip
_COMMON_OPTIONS = {
    "json": _option(
        bool, "--json", default=False, panel=_OUTPUT, help="Write one JSON document to stdout, and nothing else."
    ),
    "traceback": _option(
        bool, "--traceback", default=False, panel=_OUTPUT, help="Show the Python traceback of an error."
    ),
}  # fmt: skip


def command(function: Callable[..., int | None]) -> Callable[..., int]:
    """Return what typer calls for a command: `function` without its console, with the common options.

    The first parameter of `function` is the `Console`. Where it has a parameter `source`, the command has options that
    say how models are made, and `source` is a `ModelSource` for these. An error is one line on stderr and an exit code.
    """
    signature = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)
    own = [
        p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for p in [*signature.parameters.values()][1:]
        if p.name != "source"
    ]
    takes_model = "source" in signature.parameters
    shared = {**(_MODEL_OPTIONS if takes_model else {}), **_COMMON_OPTIONS}

    @functools.wraps(function)
    def run(**values: Any) -> int:
        console = Console(as_json=values.pop("json"))
        shows_traceback = values.pop("traceback")
        if takes_model:
            options = {name: values.pop(name) for name in _MODEL_OPTIONS}
            lists = {name: tuple(options[name] or ()) for name in ("arg", "config", "input")}
            values["source"] = ModelSource(**lists, device=options["device"], train=options["train"])
        try:
            with console.stdout_for_results():
                code = function(console, **values)
            return SUCCESS if code is None else code
        except (BrokenPipeError, UnwritableStdout):
            raise
        except KeyboardInterrupt:
            write_error("interrupted")
            return INTERRUPTED
        except (Exception, SystemExit) as error:
            if shows_traceback:
                traceback.print_exc()
            write_error(_one_line(error, shows_traceback))
            return USAGE if _is_wrong_usage(error) else FAILURE

    parameters = [*own, *shared.values()]
    # Read by typer, which would follow `__wrapped__` to the parameters of `function` otherwise.
    vars(run)["__signature__"] = signature.replace(parameters=parameters, return_annotation=int)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _is_wrong_usage(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.filename is None:  # of a stream, not of a file that was named
        return False
    return isinstance(error, _WRONG_USAGE) and not isinstance(error, BrokenModel)


def _one_line(error: BaseException, shows_traceback: bool) -> str:
    """Return what went wrong in one line; of errors that are not ours with their class."""
    if isinstance(error, SystemExit):  # its code is not ours: 0 would be a success that did not take place
        where = "" if shows_traceback else " (--traceback shows where)"
        return (
            f"the Python code of the model or the rules ended the process: SystemExit({error.code!r}){where}"
        )
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"'{os.fspath(error.filename)}': {error.strerror}"
    lines = str(error).strip().splitlines()
    if isinstance(error, (DovetailError, ModuleNotFoundError)) and lines:
        message = joined_lines(str(error))
        is_cut = len(message) > _LONGEST and not shows_traceback
        return f"{cut(message, _LONGEST)} (--traceback shows the rest)" if is_cut else message
    first = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return first if shows_traceback else f"{first} (--traceback shows where)"
