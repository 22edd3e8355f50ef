"""The documents tell the truth: examples run and print what is shown, options have one, links lead somewhere."""

import ast
import inspect
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch

import dovetail
from dovetail.rules.rule import RuleSet
from tests.guides import DOCUMENTS, FENCE, NOT_PROGRAMS, ROOT, check_examples, examples, programs

BY_NAME = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
# What the examples of a document need beyond dovetail and torch.
PACKAGES = {
    "docs/bringing-your-own-compiler.md": ("onnxruntime", "torch_mlir"),
    "docs/api/files.md": ("onnx", "torch_mlir"),
    "docs/api/tuning.md": ("sqlalchemy", "optuna"),
    "docs/tuning.md": ("sqlalchemy", "optuna", "openvino"),
    "docs/torch-compile-and-generate.md": ("transformers",),
}


@pytest.mark.parametrize("document", programs(), ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_print_what_is_shown(
    document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for package in PACKAGES.get(str(document.relative_to(ROOT)), ()):
        pytest.importorskip(package)
    # Examples write files into the folder they run in, and some switch gradients or messages off for good.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch._dynamo.reset()
    logger = logging.getLogger("dovetail")
    level = logger.level
    try:
        with torch.enable_grad(), torch.random.fork_rng():
            check_examples(document)
    finally:
        logger.setLevel(level)


def test_every_python_block_is_run() -> None:
    languages = {"py", "python3", "pycon", "ipython"}
    for document in DOCUMENTS:
        blocks = [block[1].strip("{} ") for block in FENCE.finditer(document.read_text())]
        assert not [language for language in blocks if language in languages], document.name
        assert document in programs() or document in NOT_PROGRAMS or "python" not in blocks, document.name
        # Indented code is run by nobody: it is for shells.
        prose = FENCE.sub("", document.read_text())
        code = re.findall(r"(?:^|\n\n)((?: {4}.*\n)+)", prose)
        assert not [block for block in code if re.search(r"\bdovetail\.\w+\(|^ +import ", block)], (
            document.name
        )


def test_what_is_exempt_exists_and_has_examples() -> None:
    assert all(examples(path.read_text()) for path in NOT_PROGRAMS)
    assert all((ROOT / name).exists() for name in PACKAGES)


# The options of the public surface.

# Base classes, and values that functions return or pass to users' code; nobody constructs them.
RECORDS = {
    "Cost",
    "CostModel",
    "Pass",
    "Escape",
    "Ledger",
    "Match",
    "Part",
    "Plan",
    "Region",
    "RuleContext",
    "Schedule",
    "Value",
}
# Called by dovetail, or hooks that a subclass overrides.
NOT_CALLED = {"RuleContext.fact", "Plan.lookup", "Plan.planned", "Plan.dynamic_shapes", "Plan.with_decisions"}
METHODS = ("Ledger", "Part", "Plan", "Region", "Schedule")


def callables() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """The name, the name in a call, and the function: of what has options."""
    for name in dovetail.__all__:
        value = getattr(dovetail, name)
        if not inspect.isclass(value) or (
            not issubclass(value, Exception) and name not in RECORDS and "__init__" in vars(value)
        ):
            yield name, name, value
    for name in METHODS:
        for member, value in vars(getattr(dovetail, name)).items():
            function = value.__func__ if isinstance(value, classmethod) else value
            if member.startswith("_") or not inspect.isfunction(function) or f"{name}.{member}" in NOT_CALLED:
                continue
            yield f"{name}.{member}", f".{member}", getattr(getattr(dovetail, name), member)
    for module in (dovetail.rules, dovetail.backends):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not isinstance(value, RuleSet) and name != "Backend":
                yield f"{module.__name__.removeprefix('dovetail.')}.{name}", name, value
    yield "rule(...)", "rule", dovetail.rules.patterns.pattern_rule.PatternRule


def options(function: Callable[..., Any]) -> tuple[list[str], set[str]]:
    """The arguments that may be given by position, in order, and all that may be given by name."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    named = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)}
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD], named


def calls() -> dict[str, list[ast.Call]]:
    """The calls in the examples of the API reference, by the name of the function, or the method after a dot."""
    nodes_by_name: dict[str, list[ast.Call]] = {}
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for example in examples(page.read_text()):
            for node in ast.walk(ast.parse(example.code)):
                if isinstance(node, ast.Call):
                    called = re.fullmatch(
                        r"(?:(?:dovetail\.)?(?:rules\.|backends\.)?)(\w+)", ast.unparse(node.func)
                    )
                    method = getattr(node.func, "attr", "")
                    nodes_by_name.setdefault(called[1] if called else f".{method}", []).append(node)
    return nodes_by_name


CALLS = calls()


@pytest.mark.parametrize(
    ("called", "function"), [pytest.param(called, f, id=name) for name, called, f in callables()]
)
def test_every_option_has_an_example(called: str, function: Callable[..., Any]) -> None:
    positional, named = options(function)
    given: set[str] = set()
    matching = CALLS.get(called, [])
    for call in matching:
        given |= {keyword.arg for keyword in call.keywords if keyword.arg is not None}
        given |= set(positional[: len(call.args)])
    assert matching, f"docs/api has no call of {called}"
    assert not named - given, f"docs/api has no example for these options of {called}"


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    directives = set(re.findall(r"\.\. auto\w+:: dovetail\.([\w.]+)", pages))
    errors = {
        name
        for name in dovetail.__all__
        if inspect.isclass(value := getattr(dovetail, name)) and issubclass(value, Exception)
    }
    assert "errors" in directives
    assert not set(dovetail.__all__) - errors - directives
    assert (
        not {f"rules.{n}" for n in dovetail.rules.__all__ if callable(getattr(dovetail.rules, n))}
        - directives
        - {"rules.DEFAULT"}
    )
    assert not {f"backends.{n}" for n in dovetail.backends.__all__} - directives - {"backends.Backend"}


# Links, files and targets that documents name.


def anchors(document: Path) -> set[str]:
    """The anchors of a document: those written out, and its headings as GitHub and the site name them."""
    text = document.read_text()
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h).lower()) for h in headings]
    return {heading.replace(" ", "-") for heading in slugs} | set(re.findall(r'<a id="([^"]+)">', text))


@BY_NAME
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", document.read_text()))
    missing: list[str] = []
    for link in links:
        if "://" in link:
            continue
        path, _, fragment = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (fragment and target.suffix == ".md" and fragment not in anchors(target)):
            missing.append(link)
    assert not missing


@BY_NAME
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^ {4}|^)make ([a-z-]+)", document.read_text(), re.MULTILINE))
    assert named <= targets


def test_pages_of_folders_list_every_file() -> None:
    for page in sorted((ROOT / "docs" / "internals").glob("*.md")):
        folder = ROOT / "src" / "dovetail" / page.stem
        named = set(re.findall(r"`(\w+\.py|\w+/)`", page.read_text()))
        present = {f"{p.name}/" if p.is_dir() else p.name for p in folder.iterdir()} - {
            "__init__.py",
            "__pycache__/",
        }
        inner = {p.name for p in folder.glob("*/*.py")}
        assert not present - named, page.name
        assert not named - present - inner, page.name


@BY_NAME
def test_files_named_exist(document: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)`", document.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


# The site.


class Page(HTMLParser):
    """What a page of the site refers to: links, what is loaded to show it, and its own anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "index", "search", "next", "prev"):
            self.loaded.append(values.get("href", ""))
        elif "src" in values:
            self.loaded.append(values["src"])


def test_the_site_builds_without_warnings_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-b", "html"]
    command += ["-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")} <= {
        path.relative_to(site).with_suffix("") for path in pages
    }
    dead: list[str] = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                assert link not in page.loaded or parts.scheme == "data", f"{path.name} loads {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            here = pages.get(target)
            if not target.exists() or (
                parts.fragment and here is not None and unquote(parts.fragment) not in here.anchors
            ):
                dead.append(f"{path.name}: {link}")
    assert not dead
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\(\s*['\"]?(?:https?:)?//", sheet.read_text()), sheet.name


def test_the_version_is_stated_once() -> None:
    assert f'version = "{dovetail.__version__}"' in (ROOT / "pyproject.toml").read_text()
