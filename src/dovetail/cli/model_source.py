"""MODEL of the command line: the zoo, small models of transformers, factories in Python, and `.pt2` files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from dovetail import zoo
from dovetail.cli.entry_point import joined_lines
from dovetail.errors import (
    CallMismatch,
    DovetailError,
    InvalidArgument,
    InvalidFile,
    did_you_mean,
    nearest,
)
from dovetail.formats.archive.load import load
from dovetail.frontend.calling_convention import Convention, convention_of
from dovetail.frontend.capture import capture
from dovetail.fusion.constraints import locate, resolve_constraints
from dovetail.fusion.fuse import fuse, require_rules
from dovetail.fusion.ledger import ledger_of
from dovetail.numerics.sample_inputs import domains_of, random_inputs
from dovetail.outlining.inline import inline
from dovetail.outlining.region import regions
from dovetail.reporting.report import program_title
from dovetail.rules.rule import RuleSet

_FORMS = "zoo:NAME, hf:TYPE, package.module:factory, path/to/file.py:factory, or a .pt2 file"


@dataclass(frozen=True)
class _Form:
    """A form of MODEL: what models of it are called, and the options of `ModelSource` that they take."""

    what: str
    options: tuple[str, ...]


_FILE = _Form("a file", ("input",))
_ZOO = _Form("a model of the zoo", ("arg", "device", "train"))
_TRANSFORMERS = _Form("a model of transformers", ("config", "device", "train"))
_FACTORY = _Form("a factory", ("arg", "input", "device", "train"))
_SCHEMES = {"zoo": _ZOO, "hf": _TRANSFORMERS}
_GRAPH = _Form("a captured graph", ("arg", "input"))
_FIXED = {
    "device": ": its graph is of the device it was captured on",
    "train": ": its graph is of the mode it was captured in",
}
"""Why a graph that is captured already does not take an option."""


class BrokenModel(DovetailError):
    """A model cannot be made: its factory raised, or returned something else than a model."""


@dataclass(frozen=True)
class LoadedModel:
    """A model, or the graph in a file, with inputs; `label` is what was typed."""

    label: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def is_fused(self) -> bool:
        """Whether it is a graph that has been fused already."""
        model = self.model
        return isinstance(model, GraphModule) and (bool(regions(model)) or ledger_of(model).was_fused)

    def graph(self) -> GraphModule:
        """Return the graph: that of a file, or the one captured from the model and compared with it."""
        if isinstance(self.model, GraphModule):
            return self.model
        return capture(self.model, self.args, self.kwargs, check_capture=True)

    def fused_graph(self, rules: RuleSet | None, **options: Any) -> GraphModule:
        """Return the graph fused by rules, or without any by the default ones unless it has been fused already."""
        if rules is None and not options and self.is_fused:
            return self.graph()
        gm = self.graph()
        if options.get("never"):
            self._require_unfused(gm, rules, options["never"])
        return fuse(gm, rules, **options)

    def _require_unfused(self, gm: GraphModule, rules: RuleSet | None, never: Sequence[str]) -> None:
        """Raise InvalidArgument if a region that the graph has already is, or has in it, what `never` excludes."""
        constraints = resolve_constraints(gm, (), never, [rule.kind for rule in require_rules(rules)])
        nodes = list(gm.graph.nodes)
        excluded = {nodes[i] for i in locate(nodes, constraints.excluded).values()}
        for region in regions(gm, nested=True):
            if region.kind in constraints.excluded_kinds or region.node in excluded:
                raise InvalidArgument(
                    f"--never: '{self.label}' has the region '{region.name}' of kind '{region.kind}' already, which "
                    f"fusing again does not take apart. Fuse the model that it was made from."
                )

    def summary(self) -> dict[str, Any]:
        """Return what the model is as values of JSON."""
        return {
            "model": self.label,
            "class": program_title(self.model),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "inputs": [_describe(value) for value in pytree.tree_leaves((self.args, dict(self.kwargs)))],
        }

    def __str__(self) -> str:
        facts = self.summary()
        inputs = ", ".join(facts["inputs"]) or "none"
        return f"{self.label}: {facts['class']}, {facts['parameters']:,} parameters, inputs {inputs}"


@dataclass(frozen=True)
class ModelSource:
    """The options by which a command makes models: fields as they were typed."""

    arg: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    input: tuple[str, ...] = ()
    device: str | None = None
    train: bool = False

    def load(self, name: str) -> LoadedModel:
        """Return the model of a name, in eval mode unless `train` is set, with inputs, on the device."""
        form, rest = _form(name), name.partition(":")[2]
        self._refuse(form)
        if form is _FILE:
            loaded = _from_file(name, self._inputs())
        elif form is _ZOO:
            loaded = _from_zoo(name, rest, key_values("--arg", self.arg))
        elif form is _TRANSFORMERS:
            loaded = _from_transformers(name, rest, key_values("--config", self.config))
        else:
            loaded = _from_factory(name, key_values("--arg", self.arg), self._inputs())
        if isinstance(loaded.model, GraphModule):
            self._refuse(_GRAPH if form is _FACTORY else form)
        else:
            loaded.model.train(self.train)
        return loaded if self.device is None else _moved(loaded, self.device)

    def for_each(self, *names: str) -> list[ModelSource]:
        """Return for each of several models the options that it takes.

        Raises InvalidArgument for an option that none of them takes.
        """
        forms = [_form(name) for name in names]
        self._refuse(*forms)
        return [
            replace(self, **{f.name: f.default for f in fields(self) if f.name not in form.options})
            for form in forms
        ]

    def _refuse(self, *forms: _Form) -> None:
        """Raise InvalidArgument for an option that is given and that no model of these forms takes."""
        for option in (f.name for f in fields(self) if getattr(self, f.name)):
            if not any(option in form.options for form in forms):
                whats = " or ".join(dict.fromkeys(form.what for form in forms))
                why = _FIXED.get(option, "") if {_FILE, _GRAPH} & {*forms} else ""
                raise InvalidArgument(f"--{option} is not for {whats}{why}.")

    def _inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.input:
            return None
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for number, text in enumerate(self.input):
            name, value = random_input(text, seed=number)
            if name:
                kwargs[name] = value
            else:
                args.append(value)
        return tuple(args), kwargs


def _form(name: str) -> _Form:
    """Return the form of a MODEL; raise InvalidArgument for a name of none."""
    scheme = name.partition(":")[0]
    if name.endswith(".pt2"):
        return _FILE
    if scheme in _SCHEMES:
        return _SCHEMES[scheme]
    if is_attribute(name):
        return _FACTORY
    near = nearest(name, zoo.names(), most=1)
    hint = f"Did you mean 'zoo:{near[0]}'?" if near else f"Give {_FORMS}."
    raise InvalidArgument(f"'{name}' is not a model. {hint}")


def key_values(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """Return the values of `key=value` options: literals of JSON or Python, text otherwise."""
    values: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise InvalidArgument(f"{option} {text!r} is not key=value.")
        values[key] = _literal(value)
    return values


def _literal(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


def random_input(text: str, seed: int) -> tuple[str, Tensor]:
    """Return the name, empty for a positional one, and the tensor that `[NAME=]SHAPE[:DTYPE[:BOUND]]` describes.

    Floats are normal numbers, integers are from 0 up to a bound of 2 by default, excluded.
    """
    name, equals, described = text.rpartition("=")
    shape, dtype_name, bound_text, *more = [*described.split(":"), "", ""][: max(3, described.count(":") + 1)]
    dtype = getattr(torch, dtype_name or "float32", None)
    sizes = shape.split("x") if shape else []
    bound = bound_text or "2"
    if more or (equals and not name.isidentifier()) or not all(s.isdigit() for s in (*sizes, bound)):
        raise InvalidArgument(
            f"--input {text!r} is not [NAME=]SHAPE[:DTYPE[:BOUND]], such as 1x3x224x224 or ids=2x8:int64:1000."
        )
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"--input {text!r}: there is no dtype '{dtype_name}'.")
    generator = torch.Generator().manual_seed(seed)
    extents = [int(size) for size in sizes]
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return name, torch.randn(extents, generator=generator, dtype=wide).to(dtype)
    return name, torch.randint(max(int(bound), 1), extents, generator=generator).to(dtype)


def is_attribute(name: str) -> bool:
    """Return whether a name has the form module:attribute or file.py:attribute."""
    module, colon, attribute = name.rpartition(":")
    is_module = all(part.isidentifier() for part in module.split("."))
    return bool(colon) and attribute.isidentifier() and (module.endswith(".py") or is_module)


def import_attribute(name: str) -> Any:
    """Return what module:attribute or file.py:attribute names, importing it as Python would from the current folder."""
    place, _, attribute = name.rpartition(":")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except DovetailError:
        raise
    except Exception as error:
        raise BrokenModel(f"'{place}' cannot be imported: {_at(error)}.") from error
    if not hasattr(module, attribute):
        names = [n for n in vars(module) if not n.startswith("_")]
        hint = did_you_mean(attribute, names)
        raise InvalidArgument(f"'{place}' has no '{attribute}'. {hint}".rstrip())
    return getattr(module, attribute)


def _import_module(place: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise InvalidArgument(
                f"there is no module '{place}' in {folder} or among what is installed."
            ) from None
        raise


def _import_file(path: Path) -> Any:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise InvalidArgument(f"there is no file '{path}'.")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    # The worker process of `tune` imports it by this name, unless another module has it.
    known = None if loaded is not None else importlib.util.find_spec(path.stem)
    is_free = known is not None and known.origin == str(path)
    name = path.stem if is_free else f"{path.stem}_of_{path.parent.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"'{path}' is not a file of Python.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _at(error: BaseException) -> str:
    """Return an exception in one line, with the innermost place outside of torch before its message."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}torch{os.sep}" not in f.filename
    ]
    where = f" in {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    text = joined_lines(str(error)).rstrip(".")
    return f"{type(error).__name__}{where}{': ' if text else ''}{text}"


def _called(name: str, function: Callable[..., Any], **keywords: Any) -> Any:
    try:
        return function(**keywords)
    except DovetailError:
        raise
    except Exception as error:
        raise BrokenModel(f"'{name}' cannot be made: {_at(error)}.") from error


def _from_zoo(name: str, rest: str, values: dict[str, Any]) -> LoadedModel:
    if rest not in zoo.MODELS:
        hint = did_you_mean(rest, zoo.names(), otherwise=f"There are {', '.join(zoo.names())}.")
        raise InvalidArgument(f"the zoo has no model '{rest}'. {hint}")
    entry = zoo.get(rest)
    drawn = {key: values.pop(key) for key in ("batch", "seed") if key in values}
    size = {"size": values["size"]} if "size" in values else {}
    try:
        model, inputs = entry.build(**values), entry.example_inputs(**size, **drawn)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"--arg of '{name}': {error}.") from error
    return LoadedModel(name, model, inputs.args, inputs.kwargs)


def _from_transformers(name: str, rest: str, fields: dict[str, Any]) -> LoadedModel:
    if importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError(f"'{name}' needs transformers, not installed; pip install transformers")
    from dovetail.cli.transformers_config import model_types
    from dovetail.cli.transformers_models import small_model

    if rest not in model_types():
        hint = did_you_mean(rest, model_types(), otherwise="`dovetail inspect hf:<TAB>` completes them.")
        raise InvalidArgument(f"transformers has no model type '{rest}'. {hint}")
    model, kwargs = _called(name, small_model, model_type=rest, fields=fields)
    return LoadedModel(name, model, (), kwargs)


def _from_factory(
    name: str, values: dict[str, Any], inputs: tuple[tuple[Any, ...], dict[str, Any]] | None
) -> LoadedModel:
    factory = import_attribute(name)
    if isinstance(factory, nn.Module):
        if values:
            raise InvalidArgument(f"'{name}' is a model, not a factory; it takes no --arg.")
        result: Any = factory
    elif callable(factory):
        _check_keywords(name, factory, values)
        result = _called(name, factory, **values)
    else:
        raise InvalidArgument(
            f"'{name}' is a {type(factory).__name__}, neither a model nor a factory of one."
        )
    parts = list(cast("tuple[Any, ...]", result)) if isinstance(result, tuple) else [result]
    model, args, kwargs = [*parts, (), {}][:3] if len(parts) == 1 else [*parts, {}][:3]
    args = (args,) if isinstance(args, Tensor) else args
    is_call = isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping)
    if not isinstance(model, nn.Module) or not is_call or len(parts) > 3:
        raise BrokenModel(
            f"'{name}' returned {_kind(result)}; return a module, (module, args) or (module, args, kwargs)."
        )
    if inputs is not None:
        args, kwargs = inputs
    elif len(parts) == 1 and _takes_inputs(model):
        raise InvalidArgument(
            f"'{name}' returns a model alone: give its inputs as --input SHAPE[:DTYPE], or return (model, args)."
        )
    return LoadedModel(
        name, model, tuple(cast("Sequence[Any]", args)), dict(cast("Mapping[str, Any]", kwargs))
    )


def _check_keywords(name: str, factory: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if a factory cannot be called with these keywords."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of code in C without one
        return
    try:
        signature.bind(**values)
    except TypeError as error:
        raise InvalidArgument(f"--arg of '{name}': {error}; it is called as {name}{signature}.") from None


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(v).__name__ for v in cast('tuple[Any, ...]', value))})"
    return type(value).__name__


def _takes_inputs(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _from_file(name: str, inputs: tuple[tuple[Any, ...], dict[str, Any]] | None) -> LoadedModel:
    """Return what is in an archive of `dovetail.save`, or of torch.export."""
    path = Path(name).expanduser()
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    try:
        graph: GraphModule = load(path)
    except InvalidFile as error:
        if "archive of torch.export" not in str(error):
            raise
        try:
            program = torch.export.load(path)
        except Exception as failure:
            raise InvalidFile(name, f"cannot be read by torch.export: {_at(failure)}.") from failure
        # Whatever mode it was exported in is part of the program.
        graph, example = capture(program).eval(), cast("Any", program.example_inputs)
    args, kwargs = inputs or example or example_call(graph)
    if inputs is not None:
        _require_call(name, graph, args, kwargs)
    return LoadedModel(name, graph, args, kwargs)


def _require_call(name: str, gm: GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidArgument for inputs that a captured graph is not called with."""
    convention = convention_of(gm)
    try:
        if convention is not None:
            convention.guard(gm)(*args, **kwargs)
    except CallMismatch as error:
        raise InvalidArgument(f"--input of '{name}': {error}") from error


def example_call(gm: GraphModule) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return random inputs for a captured graph, within the domains that its operators require."""
    flat = inline(gm)
    placeholders = list(flat.graph.find_nodes(op="placeholder"))
    values = random_inputs([node.meta.get("val") for node in placeholders], domains=domains_of(flat.graph))
    convention = convention_of(gm)
    return (tuple(values), {}) if convention is None else _call_with(convention, values)


def _call_with(convention: Convention, flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the call that binds these inputs of a graph."""
    leaves: list[Any] = [None] * convention.in_spec.num_leaves
    for value, position in zip(flat, convention.order, strict=True):
        leaves[position] = value
    captured = [slot for slot in convention.slots if slot.captured]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for slot, value in zip(captured, pytree.tree_unflatten(leaves, convention.in_spec), strict=True):
        if slot.kind is inspect.Parameter.VAR_POSITIONAL:
            args += value
        elif slot.kind is inspect.Parameter.VAR_KEYWORD:
            kwargs |= value
        elif slot.by_name or slot.kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[slot.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _moved(loaded: LoadedModel, device: str) -> LoadedModel:
    try:
        place = torch.device(device)
        model = loaded.model.to(place)
        move: Callable[[Any], Any] = lambda v: v.to(place) if isinstance(v, Tensor) else v  # noqa: E731
        args, kwargs = pytree.tree_map(move, (loaded.args, dict(loaded.kwargs)))
    except (RuntimeError, AssertionError) as error:
        raise InvalidArgument(f"--device {device}: {next(iter(str(error).splitlines()))}") from error
    return LoadedModel(loaded.label, model, args, kwargs)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if isinstance(value, (int, float, bool, str)) else type(value).__name__
