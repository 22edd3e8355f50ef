"""A stored capture is used if, and only if, another process would trace the model to the same graph."""

import logging
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dovetail
from dovetail.frontend import capture as frontend
from dovetail.frontend.trace_dependencies import TraceRecord
from dovetail.runtime.module_guard import ModuleGuard
from dovetail.runtime.stored_captures import StoredCaptures

HEAD = """
import contextvars, dataclasses, enum, functools, math, os, random, threading, time, types
import torch
import torch.nn.functional as F
from torch import nn
"""

SOURCE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, x):
        return {expression}
"""


class Memory:
    """A store of captures in memory."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def read(self, key: str) -> bytes | None:
        return self.entries.get(key)

    def write(self, key: str, data: bytes) -> None:
        self.entries[key] = data


def module_of(source: str, tmp_path: Path) -> Any:
    """Return a module with this source, as another process would import it."""
    module = types.ModuleType("stored_model")
    path = tmp_path / "stored_model.py"
    text = HEAD + textwrap.dedent(source)
    path.write_text(text)
    module.__file__ = str(path)
    sys.modules["stored_model"] = module
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def captured(
    store: Memory,
    model: nn.Module,
    args: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    compares: bool = False,
    check_capture: bool = True,
) -> tuple[Any, bool, str]:
    """Return the graph, whether the model was traced for it, and why it was not stored."""
    traces: list[Any] = []
    original = frontend.trace

    def counted(*args: Any, **kwargs: Any) -> Any:
        traces.append(args)
        return original(*args, **kwargs)

    captures = StoredCaptures(store)
    with monkeypatch.context() as patch:
        patch.setattr(frontend, "trace", counted)
        if not compares:
            # What is recorded alone decides.
            patch.setattr(frontend, "compare_with_model", lambda *_: True)
        graph = captures.capture(model, args, {}, state=ModuleGuard(model).key(), check_capture=check_capture)
    return graph, bool(traces), captures.origin.reason


def check(first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the capture of the first source is used for it again, and not for the second one."""
    store, args = Memory(), (torch.randn(2, 4),)

    def run(source: str) -> bool:
        module = module_of(source, tmp_path)
        build = getattr(module, "build", None) or module.Model
        model = build().eval()
        graph, is_traced, reason = captured(store, model, args, monkeypatch)
        assert not reason
        torch.testing.assert_close(graph(*args), model(*args), rtol=0, atol=0)
        return is_traced

    assert run(first)
    assert not run(first)
    assert run(second)


CHANGES = {
    "its own code": (
        SOURCE.format(expression="self.lin(x) + 1"),
        SOURCE.format(expression="self.lin(x) + 2"),
    ),
    "a line moved": (
        SOURCE.format(expression="self.lin(x)"),
        "\n\n" + SOURCE.format(expression="self.lin(x)"),
    ),
    "a global number": (
        "SCALE = 2\n" + SOURCE.format(expression="self.lin(x) * SCALE"),
        "SCALE = 3\n" + SOURCE.format(expression="self.lin(x) * SCALE"),
    ),
    "a function it calls": (
        "def f(x): return x + 1\n" + SOURCE.format(expression="f(self.lin(x))"),
        "def f(x): return x - 1\n" + SOURCE.format(expression="f(self.lin(x))"),
    ),
    "a function that a function calls": (
        "def g(x): return x + 1\ndef f(x): return g(x)\n" + SOURCE.format(expression="f(self.lin(x))"),
        "def g(x): return x - 1\ndef f(x): return g(x)\n" + SOURCE.format(expression="f(self.lin(x))"),
    ),
    "a closure": (
        "def made(k):\n    def f(x): return x * k\n    return f\nf = made(2)\n"
        + SOURCE.format(expression="f(x)"),
        "def made(k):\n    def f(x): return x * k\n    return f\nf = made(3)\n"
        + SOURCE.format(expression="f(x)"),
    ),
    "a default": (
        "def f(x, k=2): return x * k\n" + SOURCE.format(expression="f(x)"),
        "def f(x, k=3): return x * k\n" + SOURCE.format(expression="f(x)"),
    ),
    "a default of a keyword": (
        "def f(x, *, k=2): return x * k\n" + SOURCE.format(expression="f(x)"),
        "def f(x, *, k=3): return x * k\n" + SOURCE.format(expression="f(x)"),
    ),
    "a partial": (
        "f = functools.partial(torch.mul, other=2)\n" + SOURCE.format(expression="f(x)"),
        "f = functools.partial(torch.mul, other=3)\n" + SOURCE.format(expression="f(x)"),
    ),
    "an element of a global dict": (
        "C = {'a': [1, {'k': 2}]}\n" + SOURCE.format(expression="x * C['a'][1]['k']"),
        "C = {'a': [1, {'k': 3}]}\n" + SOURCE.format(expression="x * C['a'][1]['k']"),
    ),
    "an attribute of a configuration": (
        "class C:\n    pass\nc = C()\nc.k = 2\n" + SOURCE.format(expression="x * c.k"),
        "class C:\n    pass\nc = C()\nc.k = 3\n" + SOURCE.format(expression="x * c.k"),
    ),
    "a class attribute": (
        "class C:\n    k = 2\n" + SOURCE.format(expression="x * C.k"),
        "class C:\n    k = 3\n" + SOURCE.format(expression="x * C.k"),
    ),
    "an inherited attribute": (
        "class B:\n    k = 2\nclass C(B):\n    pass\n" + SOURCE.format(expression="x * C().k"),
        "class B:\n    k = 3\nclass C(B):\n    pass\n" + SOURCE.format(expression="x * C().k"),
    ),
    "a property": (
        "class C:\n    @property\n    def k(self): return 2\n" + SOURCE.format(expression="x * C().k"),
        "class C:\n    @property\n    def k(self): return 3\n" + SOURCE.format(expression="x * C().k"),
    ),
    "a field of a data class": (
        "@dataclasses.dataclass\nclass C:\n    k: int = 2\n" + SOURCE.format(expression="x * C().k"),
        "@dataclasses.dataclass\nclass C:\n    k: int = 3\n" + SOURCE.format(expression="x * C().k"),
    ),
    "a slot": (
        "class C:\n    __slots__ = ('k',)\nc = C()\nc.k = 2\n" + SOURCE.format(expression="x * c.k"),
        "class C:\n    __slots__ = ('k',)\nc = C()\nc.k = 3\n" + SOURCE.format(expression="x * c.k"),
    ),
    "a member of an enumeration": (
        "class E(enum.Enum):\n    K = 2\n" + SOURCE.format(expression="x * E.K.value"),
        "class E(enum.Enum):\n    K = 3\n" + SOURCE.format(expression="x * E.K.value"),
    ),
    "an attribute of another module": (
        "cfg = types.ModuleType('cfg')\ncfg.k = 2\n" + SOURCE.format(expression="x * cfg.k"),
        "cfg = types.ModuleType('cfg')\ncfg.k = 3\n" + SOURCE.format(expression="x * cfg.k"),
    ),
    "a context variable": (
        "v = contextvars.ContextVar('v')\nv.set(2)\n" + SOURCE.format(expression="x * v.get()"),
        "v = contextvars.ContextVar('v')\nv.set(3)\n" + SOURCE.format(expression="x * v.get()"),
    ),
    "an attribute of a thread": (
        "t = threading.local()\nt.k = 2\n" + SOURCE.format(expression="x * t.k"),
        "t = threading.local()\nt.k = 3\n" + SOURCE.format(expression="x * t.k"),
    ),
    "a cached function": (
        "@functools.lru_cache\ndef k(): return 2\n" + SOURCE.format(expression="x * k()"),
        "@functools.lru_cache\ndef k(): return 3\n" + SOURCE.format(expression="x * k()"),
    ),
    "a subclass of a number": (
        "class N(int):\n    pass\nn = N(2)\nn.k = 2\n" + SOURCE.format(expression="x * n.k"),
        "class N(int):\n    pass\nn = N(2)\nn.k = 3\n" + SOURCE.format(expression="x * n.k"),
    ),
    "the factory of a dict": (
        "from collections import defaultdict\nd = defaultdict(lambda: 2)\n"
        + SOURCE.format(expression="x * dict(d).get(0, d.default_factory())"),
        "from collections import defaultdict\nd = defaultdict(lambda: 3)\n"
        + SOURCE.format(expression="x * dict(d).get(0, d.default_factory())"),
    ),
    "a replaced function of torch": (
        SOURCE.format(expression="F.relu(x)"),
        SOURCE.format(expression="F.relu(x)")
        + "\ndef build():\n    m = Model()\n    m.__class__.forward.__globals__['F'] = types.SimpleNamespace(relu=torch.sigmoid)\n    return m\n",
    ),
    "a replaced method of a module": (
        SOURCE.format(expression="self.lin(x)"),
        SOURCE.format(expression="self.lin(x)")
        + "\ndef build():\n    m = Model()\n    m.lin.forward = lambda x: x * 2\n    return m\n",
    ),
    "a hook of a submodule": (
        SOURCE.format(expression="self.lin(x)"),
        SOURCE.format(expression="self.lin(x)")
        + "\ndef hook(module, args, result): return result * 2\n"
        + "def build():\n    m = Model()\n    m.lin.register_forward_hook(hook)\n    return m\n",
    ),
    "a number in a hook of a submodule": tuple(
        SOURCE.format(expression="self.lin(x)")
        + "\ndef made(k): return lambda module, args, result: result * k\n"
        + f"def build():\n    m = Model()\n    m.lin.register_forward_hook(made({k}))\n    return m\n"
        for k in (2, 3)
    ),
    "a tensor that is no parameter": (
        SOURCE.format(expression="x * self.c")
        + "\ndef build():\n    m = Model()\n    m.c = torch.full((4,), 2.0)\n    return m\n",
        SOURCE.format(expression="x * self.c")
        + "\ndef build():\n    m = Model()\n    m.c = torch.full((4,), 3.0)\n    return m\n",
    ),
    "an attribute with a composed name": (
        SOURCE.format(expression="x * getattr(self, f'k{1}')")
        + "\ndef build():\n    m = Model()\n    m.k1 = [2][0]\n    return m\n",
        SOURCE.format(expression="x * getattr(self, f'k{1}')")
        + "\ndef build():\n    m = Model()\n    m.k1 = [3][0]\n    return m\n",
    ),
    "an attribute whose name is a value": (
        "class C:\n    pass\nNAME = 'ke' + 'y'\nc = C()\nc.key = 2\n"
        + SOURCE.format(expression="x * getattr(c, NAME)"),
        "class C:\n    pass\nNAME = 'ke' + 'y'\nc = C()\nc.key = 3\n"
        + SOURCE.format(expression="x * getattr(c, NAME)"),
    ),
    "attributes read by vars": (
        "class C:\n    pass\nc = C()\nc.key = 2\n" + SOURCE.format(expression="x * sum(vars(c).values())"),
        "class C:\n    pass\nc = C()\nc.key = 3\n" + SOURCE.format(expression="x * sum(vars(c).values())"),
    ),
    "attributes read by __dict__": (
        "class C:\n    pass\nc = C()\nc.key = 2\n" + SOURCE.format(expression="x * sum(c.__dict__.values())"),
        "class C:\n    pass\nc = C()\nc.key = 3\n" + SOURCE.format(expression="x * sum(c.__dict__.values())"),
    ),
    "a metaclass": (
        "class T(type):\n    def k(cls): return 2\nclass C(metaclass=T):\n    pass\n"
        + SOURCE.format(expression="x * C.k()"),
        "class T(type):\n    def k(cls): return 3\nclass C(metaclass=T):\n    pass\n"
        + SOURCE.format(expression="x * C.k()"),
    ),
    "an operator of an object": (
        "class C:\n    def __mul__(self, x): return x * 2\nc = C()\n" + SOURCE.format(expression="c * x"),
        "class C:\n    def __mul__(self, x): return x * 3\nc = C()\n" + SOURCE.format(expression="c * x"),
    ),
    "an attribute made on access": (
        "class C:\n    def __getattr__(self, n): return 2\nc = C()\n"
        + SOURCE.format(expression="x * c.anything"),
        "class C:\n    def __getattr__(self, n): return 3\nc = C()\n"
        + SOURCE.format(expression="x * c.anything"),
    ),
    "a lambda in an attribute": (
        SOURCE.format(expression="self.f(x)")
        + "\ndef build():\n    m = Model()\n    m.f = lambda x: x * 2\n    return m\n",
        SOURCE.format(expression="self.f(x)")
        + "\ndef build():\n    m = Model()\n    m.f = lambda x: x * 3\n    return m\n",
    ),
    "a function imported inside": (
        "k = 2\n"
        + SOURCE.format(expression="x * __import__('stored_model').k").replace(
            "__import__('stored_model')", "mod()"
        )
        + "\ndef mod():\n    import stored_model\n    return types.SimpleNamespace(k=stored_model.k)\n",
        "k = 3\n"
        + SOURCE.format(expression="x * __import__('stored_model').k").replace(
            "__import__('stored_model')", "mod()"
        )
        + "\ndef mod():\n    import stored_model\n    return types.SimpleNamespace(k=stored_model.k)\n",
    ),
    "a getter of attributes": (
        "import operator\nC = types.SimpleNamespace(k=2)\nG = operator.attrgetter('k')\n"
        + SOURCE.format(expression="x * G(C)"),
        "import operator\nC = types.SimpleNamespace(k=2, j=3)\nG = operator.attrgetter('j')\n"
        + SOURCE.format(expression="x * G(C)"),
    ),
    "a decorator of torch around it": (
        SOURCE.format(expression="f(x)") + "\n@torch.no_grad()\ndef f(x): return x * 2\n",
        SOURCE.format(expression="f(x)") + "\n@torch.no_grad()\ndef f(x): return x * 3\n",
    ),
    "sizes of a parameter's neighbour": (
        SOURCE.format(expression="x * len(self.items)")
        + "\ndef build():\n    m = Model()\n    m.items = [1, 2]\n    return m\n",
        SOURCE.format(expression="x * len(self.items)")
        + "\ndef build():\n    m = Model()\n    m.items = [1, 2, 3]\n    return m\n",
    ),
    "tied weights": (
        SOURCE.format(expression="self.lin(x) + self.other(x)")
        + "\ndef build():\n    m = Model()\n    m.other = nn.Linear(4, 4)\n    return m\n",
        SOURCE.format(expression="self.lin(x) + self.other(x)")
        + "\ndef build():\n    m = Model()\n    m.other = nn.Linear(4, 4)\n    m.other.weight = m.lin.weight\n    return m\n",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_capture_is_used_again_unless_something_it_read_differs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(*CHANGES[name], tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (SOURCE.format(expression="x * float(os.environ.get('K', 2))"), "os.environ"),
        (SOURCE.format(expression="x * len(os.getcwd())"), "os.getcwd"),
        (SOURCE.format(expression="x * (time.time() > 0)"), "time.time"),
        (SOURCE.format(expression="x * eval('2')"), "eval"),
        (SOURCE.format(expression="x * len(globals())"), "globals"),
        ("import sys\nme = sys.modules\n" + SOURCE.format(expression="x * len(me)"), ""),
        (
            "N = 0\ndef f():\n    global N\n    N += 1\n    return N\n" + SOURCE.format(expression="x * f()"),
            "writes the global N",
        ),
        (
            "C = {'n': 0}\ndef f():\n    C['n'] += 1\n    return 2\n" + SOURCE.format(expression="x * f()"),
            "forward changes",
        ),
        (
            "import sys\nf = sys.__stdout__\n" + SOURCE.format(expression="x * (f.fileno() > 0)"),
            "TextIOWrapper",
        ),
        ("import numpy.random\n" + SOURCE.format(expression="x * len(str(numpy))"), "the module numpy"),
    ],
)
def test_a_capture_that_depends_on_more_is_not_stored(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Memory()
    model = module_of(source, tmp_path).Model().eval()
    _, is_traced, why = captured(store, model, (torch.randn(2, 4),), monkeypatch, compares=True)
    assert is_traced
    assert why
    assert reason in why
    assert not store.entries


def test_code_that_no_name_reaches_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCE.format(expression="TABLE['f'](x)") + "\nTABLE = {}\n"
    module, store = module_of(source, tmp_path), Memory()
    # A function that only an object of C refers to.
    hidden = types.FunctionType(compile("lambda x: x * 2", "hidden", "eval").co_consts[0], {})
    functions = iter([hidden])
    module.TABLE["f"] = lambda x: next(functions)(x)
    _, _, why = captured(store, module.Model().eval(), (torch.randn(2, 4),), monkeypatch)
    assert "iterator" in why
    assert not store.entries


def test_handlers_of_logging_are_not_code_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    class Upper(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return super().format(record).upper()

    def accepts(record: logging.LogRecord) -> bool:
        return "heard" in record.getMessage()

    lines, handler, logger = list[str](), Lines(), logging.getLogger("stored_model")
    handler.setFormatter(Upper())
    handler.addFilter(accepts)
    source = "import logging\ndef f(x):\n    logging.getLogger('stored_model').warning('heard')\n    return x * 2\n"
    model = module_of(source + SOURCE.format(expression="f(self.lin(x))"), tmp_path).Model().eval()
    store, args = Memory(), (torch.randn(2, 4),)
    logger.addHandler(handler)
    try:
        _, is_traced, reason = captured(store, model, args, monkeypatch)
        assert (is_traced, reason) == (True, "")
        assert "HEARD" in lines
        assert not captured(store, model, args, monkeypatch)[1]
    finally:
        logger.removeHandler(handler)


def test_settings_of_the_process_are_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, args = Memory(), (torch.randn(2, 4),)
    module = module_of(SOURCE.format(expression="self.lin(x)"), tmp_path)

    def is_traced(args: Any = args, training: bool = False) -> bool:
        return captured(store, module.Model().train(training), args, monkeypatch)[1]

    assert is_traced()
    assert not is_traced()
    with torch.no_grad():
        assert is_traced()
    with torch.autocast("cpu", torch.bfloat16):
        assert is_traced()
    assert is_traced(training=True)
    assert is_traced((torch.randn(4, 2).t(),))
    assert is_traced((torch.randn(2, 4, requires_grad=True),))
    assert is_traced((torch.randn(3, 4),))
    marked = torch.randn(2, 4)
    torch._dynamo.mark_dynamic(marked, 0)
    assert is_traced((marked,))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert is_traced()
    assert not is_traced()


def test_a_damaged_entry_is_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, args = Memory(), (torch.randn(2, 4),)
    module = module_of(SOURCE.format(expression="self.lin(x)"), tmp_path)
    captured(store, module.Model().eval(), args, monkeypatch)
    store.entries = {key: data[: len(data) // 2] for key, data in store.entries.items()}
    assert captured(store, module.Model().eval(), args, monkeypatch)[1]


def test_the_graph_has_the_weights_of_the_model_it_is_read_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, args = Memory(), (torch.randn(2, 4),)
    module = module_of(SOURCE.format(expression="self.lin(x)"), tmp_path)
    captured(store, module.Model().eval(), args, monkeypatch)
    model = module.Model().eval()
    graph, is_traced, _ = captured(store, model, args, monkeypatch)
    assert not is_traced
    assert torch.equal(graph(*args), model(*args))
    assert {id(p) for p in graph.parameters()} == {id(p) for p in model.parameters()}
    with torch.no_grad():
        model.lin.weight.add_(1)
    assert torch.equal(graph(*args), model(*args))


SECOND = """
import sys, torch, torch.export
import dovetail
from dovetail.zoo import get
def refuse(*args, **kwargs):
    raise AssertionError("the model is exported")
if sys.argv[2] == "second":
    torch.export.export = refuse
torch.manual_seed(0)
model = get(sys.argv[1]).build().eval()
inputs = get(sys.argv[1]).example_inputs()
with torch.no_grad():
    fast = dovetail.compile(model, inputs.args, inputs.kwargs, backends="torchscript", cache=sys.argv[3], on_error="raise")
    result, expected = fast(*inputs.args, **inputs.kwargs), model(*inputs.args, **inputs.kwargs)
torch.testing.assert_close(result, expected)
print("inductor" if "torch._inductor.compile_fx" in sys.modules else "ok", len(fast.diagnostics))
"""


@pytest.mark.parametrize("name", ["llama", pytest.param("moe", marks=pytest.mark.long)])
def test_a_second_process_does_not_export(name: str, tmp_path: Path) -> None:
    script = tmp_path / "second.py"
    script.write_text(SECOND)
    for which in ("first", "second"):
        done = subprocess.run(
            [sys.executable, str(script), name, which, str(tmp_path / "cache")],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["ok", "0"]


def test_without_a_cache_nothing_is_recorded(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    fast = dovetail.compile(model, (x,), backends="eager", cache=False)
    with pytest.raises(dovetail.InvalidArgument, match="cache"):
        dovetail.bundle(fast, tmp_path / "x.bundle")


def test_a_stored_graph_is_compared_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A record that lacks what the model reads.
    monkeypatch.setattr(TraceRecord, "current", lambda record, *_, **__: record.facts)
    store, args = Memory(), (torch.randn(2, 4),)
    for constant, is_traced_now in ((1, True), (1, False), (2, True)):
        module = module_of(
            f"SCALE = {constant}\n" + SOURCE.format(expression="self.lin(x) * SCALE"), tmp_path
        )
        torch.manual_seed(0)
        model = module.Model().eval()
        graph, is_traced, _ = captured(store, model, args, monkeypatch, compares=True)
        assert is_traced is is_traced_now
        torch.testing.assert_close(graph(*args), model(*args), rtol=0, atol=0)
    assert "the stored graph differs from it" in caplog.text


def test_a_stored_graph_is_not_used_without_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, args = Memory(), (torch.randn(2, 4),)
    model = module_of(SOURCE.format(expression="self.lin(x)"), tmp_path).Model().eval()
    assert captured(store, model, args, monkeypatch)[1]
    assert not captured(store, model, args, monkeypatch)[1]
    assert captured(store, model, args, monkeypatch, check_capture=False)[1]
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(args[0])
    assert captured(store, model, (fake,), monkeypatch, compares=True)[1]
    assert captured(store, model, (fake,), monkeypatch, compares=True)[1]


GATED = """
FACTOR = {factor}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.gate = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))
    def forward(self, x):
        return x + self.gate * {branch}
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"branch": "self.lin(x) * FACTOR", "factor": 2.0}, {"factor": 3.0}),
        ({"branch": "self.lin(x).softmax(FACTOR)", "factor": 0}, {"factor": 1}),
        ({"branch": "self.lin(x)", "factor": 0}, {"branch": "self.lin(x).detach()"}),
        ({"branch": "torch.tanh(self.lin(x))", "factor": 0}, {"branch": "torch.sigmoid(self.lin(x))"}),
    ],
)
def test_a_branch_whose_gate_is_zero_is_compared_by_its_operators(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded does not differ here, nor do the results."""
    monkeypatch.setattr(TraceRecord, "current", lambda self, *_, **__: self.facts)
    store, args = Memory(), (torch.randn(2, 4),)

    def is_traced(values: dict[str, Any]) -> bool:
        model = module_of(GATED.format(**values), tmp_path).Model().eval()
        graph, traced, _ = captured(store, model, args, monkeypatch, compares=True)
        with torch.no_grad():
            model.gate.add_(1.0)
        torch.testing.assert_close(graph(*args), model(*args), rtol=0, atol=0)
        return traced

    assert is_traced(first)
    assert not is_traced(first)
    assert is_traced(first | second)
