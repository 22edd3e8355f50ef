"""The source keeps its shape: imports point one way, files stay small, names do not collide."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dovetail

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "dovetail"
MOST_LINES = 600
# A shorter file that only one other imports belongs into that one.
FEWEST_LINES = 80
# The one table of modules by name: the backends that come with dovetail.
BACKEND_TABLE = "dovetail.lowering.backend_protocol"
# Words that do not name what a variable holds, or that the field has a term for.
RETIRED = {
    *(
        "told",
        "tells",
        "says",
        "said",
        "made",
        "found",
        "wanted",
        "world",
        "looks",
        "several",
        "plain",
        "shut",
    ),
    *("barred", "listed", "lies", "standin", "makeup", "wish", "wishes", "whoever"),
}
# Names that users meet: attributes of refusals and of the context of rules; names of torch.distributed.
PUBLIC_WORDS = {"wanted", "barred", "world_size", "WORLD"}
# A group of entry points looks like a key of meta, and is none.
ENTRY_POINTS = "dovetail.backends"

# A part may import from itself and from those before it.
ORDER = (
    "errors",
    "config",
    "torch_compat",
    "ir",
    "frontend",
    "outlining",
    "rules",
    "fusion",
    "passes",
    "numerics",
    "lowering",
    "formats",
    "backends",
    "runtime",
    "scheduling",
    "tuning",
    "reporting",
    "zoo",
    "cli",
    "__main__",
)
# The zoo is plain torch, so that it can be read, copied and run without the rest.
STANDS_ALONE = "zoo"

FILES = sorted(SOURCE.rglob("*.py"))


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in FILES}


def imported(path: Path, statement: ast.AST) -> Iterator[str]:
    """The modules of dovetail that a statement imports."""
    modules: list[str] = []
    if isinstance(statement, ast.Import):
        modules = [alias.name for alias in statement.names]
    elif isinstance(statement, ast.ImportFrom):
        package = module_name(path).split(".")
        if path.name != "__init__.py":
            package.pop()
        above = package[: len(package) - statement.level + 1] if statement.level else []
        base = ".".join([*above, *(statement.module or "").split(".")]).strip(".")
        inside = [f"{base}.{alias.name}" for alias in statement.names]
        modules = [name if name in NAMES else base for name in inside]
    yield from (name for name in dict.fromkeys(modules) if name.split(".")[0] == "dovetail")


def part(name: str) -> str:
    """The entry of ORDER a module belongs to; empty for the package's own __init__."""
    return name.split(".")[1] if "." in name else ""


def may_import(importer: str, imports: str) -> bool:
    if not importer:
        return imports != STANDS_ALONE
    if importer == STANDS_ALONE or not imports:
        return importer == imports
    return ORDER.index(imports) <= ORDER.index(importer)


def test_every_part_has_a_place_in_the_order() -> None:
    assert {part(name) for name in NAMES} <= {"", *ORDER}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    own = part(module_name(path))
    wrong = [
        f"{path.relative_to(ROOT)}:{statement.lineno} imports {name}"
        for statement in ast.walk(syntax_tree(path))
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for name in imported(path, statement)
        if not may_import(own, part(name))
    ]
    assert not wrong


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    edges = {
        name: {n for statement in syntax_tree(path).body for n in imported(path, statement)}
        for name, path in NAMES.items()
        if name != "dovetail"
    }
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_private_names_stay_in_their_module(path: Path) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{statement.lineno} takes {alias.name}"
        for statement in ast.walk(syntax_tree(path))
        if isinstance(statement, ast.ImportFrom) and any(imported(path, statement))
        for alias in statement.names
        if alias.name.startswith("_")
    ]
    assert not wrong


def test_files_fit_in_the_head() -> None:
    files = [*FILES, *(ROOT / "tests").rglob("*.py")]
    counts = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert not {name: lines for name, lines in counts.items() if lines > MOST_LINES}


def test_no_module_has_the_name_of_something_public() -> None:
    # Importing such a module would replace the function as an attribute of the package.
    assert not {path.stem for path in SOURCE.iterdir()} & set(dovetail.__all__)


def test_meta_keys_are_spelled_in_one_module_and_documented() -> None:
    spelled: dict[str, set[str]] = {}
    for name, path in NAMES.items():
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.Constant) and re.fullmatch(r"dovetail\.[a-z_]+", str(node.value)):
                if node.value == ENTRY_POINTS:
                    continue
                spelled.setdefault(str(node.value), set()).add(name)
    assert not {key: where for key, where in spelled.items() if len(where) > 1}
    documents = (ROOT / "docs" / "internals.md").read_text()
    assert not [key for key in spelled if f"`{key}`" not in documents]


def importers() -> dict[str, set[str]]:
    """By module, the modules that import it, at any depth of their code."""
    users: dict[str, set[str]] = {name: set() for name in NAMES}
    for name, path in NAMES.items():
        for statement in ast.walk(syntax_tree(path)):
            for other in imported(path, statement):
                users.setdefault(other, set()).add(name)
    return users


def test_short_files_have_two_importers() -> None:
    # A backend is imported by name, through the one table of them; settings are read by users.
    users = importers()
    short = [
        name
        for name, path in NAMES.items()
        if path.name != "__init__.py"
        and part(name) not in ("zoo", "backends", "config", "__main__")
        and len(path.read_text().splitlines()) < FEWEST_LINES
        and len(users[name]) < 2
    ]
    assert not short


def test_file_and_class_names_are_used_once() -> None:
    files = [path for path in FILES if path.name != "__init__.py" and part(module_name(path)) != STANDS_ALONE]
    classes = [
        node.name for path in files for node in ast.walk(syntax_tree(path)) if isinstance(node, ast.ClassDef)
    ]
    assert not {name for name, count in Counter(path.name for path in files).items() if count > 1}
    assert not {name for name, count in Counter(classes).items() if count > 1}


def test_every_function_has_a_name() -> None:
    assert not [
        f"{name}:{node.lineno}"
        for name, path in NAMES.items()
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "_"
    ]


def test_imports_by_string_do_not_point_upwards() -> None:
    # The names of the built-in backends are resolved like entry points.
    wrong = [
        f"{name}:{node.lineno} names {node.value}"
        for name, path in NAMES.items()
        if part(name) and name != BACKEND_TABLE
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Constant)
        and node.value in NAMES
        and node.value.count(".") > 1  # a key of meta may be called like a folder
        and not may_import(part(name), part(node.value))
    ]
    assert not wrong


def identifiers(path: Path) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def test_identifiers_say_what_they_name() -> None:
    sources = [path for path in FILES if part(module_name(path)) != STANDS_ALONE]
    others = [
        path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    retired = {
        str(path.relative_to(ROOT)): [
            name
            for name in sorted(identifiers(path) - PUBLIC_WORDS)
            if RETIRED & set(name.lower().strip("_").split("_"))
        ]
        for path in [*sources, *others]
    }
    assert not {path: names for path, names in retired.items() if names}
