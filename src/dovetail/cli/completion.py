"""Shell completion of models, backends and rules; nothing is imported for it that takes long."""

from __future__ import annotations

import contextlib
import glob
import io
import os
from collections.abc import Generator, Iterable, MutableMapping
from importlib.util import find_spec

from dovetail import zoo
from dovetail.lowering.backend_protocol import backend_names

_VARIABLE = "_DOVETAIL_COMPLETE"


@contextlib.contextmanager
def words_split_at_colons(environment: MutableMapping[str, str]) -> Generator[None]:
    """Serve a completion in bash, which takes `zoo:llama` for three words and replaces only the last of them.

    The words that typer reads from the environment are joined again, and what it prints begins after the last colon.
    """
    if environment.get(_VARIABLE) != "complete_bash" or "COMP_WORDS" not in environment:
        yield
        return
    words, current = environment["COMP_WORDS"].split("\n"), int(environment.get("COMP_CWORD", "0"))
    joined: list[str] = []
    for number, word in enumerate(words[: current + 1]):
        if number and (word == ":" or words[number - 1] == ":"):
            joined[-1] += word
        else:
            joined.append(word)
    environment.update(COMP_WORDS="\n".join(joined), COMP_CWORD=str(len(joined) - 1))
    start = joined[-1].rfind(":") + 1
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            print(line[start:])


def complete_model(incomplete: str) -> list[str]:
    """Return models of the zoo and of transformers, and files that may hold one, that begin like a word."""
    names = [f"zoo:{name}" for name in zoo.names()]
    if incomplete.startswith("hf:"):
        names += [f"hf:{name}" for name in _transformers_types()]
    else:
        names.append("hf:")
    for path in sorted(glob.glob(f"{glob.escape(incomplete)}*")) if incomplete else []:
        if os.path.isdir(path):
            names.append(f"{path}{os.sep}")
        elif path.endswith(".pt2"):
            names.append(path)
        elif path.endswith(".py"):
            names.append(f"{path}:")
    return _beginning_with(incomplete, names)


def complete_backend(incomplete: str) -> list[str]:
    """Return the backends that begin like a word."""
    return _beginning_with(incomplete, backend_names())


def complete_rules(incomplete: str) -> list[str]:
    """Return the rule sets, and rules of the library, that begin like a word."""
    from dovetail.cli.rule_names import known_rules

    return _beginning_with(incomplete, known_rules())


def _beginning_with(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _transformers_types() -> list[str]:
    if find_spec("transformers") is None:
        return []
    from dovetail.cli.transformers_config import model_types

    return model_types()
