"""AOTInductor packages: what is taken, and one that is compiled, kept and loaded."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.backends.inductor import Aoti
from dovetail.lowering.backend_protocol import by_name
from tests.lowering.helpers import Blocks, events, fused


def whole(function: Any, *args: Any, **options: Any) -> dovetail.Region:
    gm = dovetail.capture(function, args, **options)
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    return dovetail.regions(dovetail.outline(gm, calls, kind="whole"))[0]


def test_what_it_takes() -> None:
    x = torch.randn(4, 8)
    backend = by_name("aoti")
    assert backend.can_save
    assert backend.supports(whole(lambda x: x.relu() + 1, x)) is True
    random = backend.supports(whole(lambda x: F.dropout(x.relu(), 0.5), x))
    assert "(random)" in random.reason
    dynamic = {"x": {0: torch.export.Dim("rows", min=2)}}
    varying = backend.supports(whole(lambda x: x.relu() + 1, x, dynamic_shapes=dynamic))
    assert varying.reason == "the sizes of its operand 'x' may vary"


def test_options_are_part_of_what_it_is() -> None:
    assert Aoti({"max_autotune": True}).options == {"max_autotune": True}
    assert pickle.loads(pickle.dumps(Aoti({"a": 1}))).options == {"a": 1}


def test_calls_that_need_gradients_run_the_body() -> None:
    model, x = Blocks(), torch.randn(3, 8)
    lowered = dovetail.lower(fused(model, x), ["aoti"], cache=False)
    assert {r.backend for r in dovetail.regions(lowered)} == {None}
    assert "autograd cannot go through" in events(lowered)[0].reason
    assert torch.equal(lowered(x), model(x))


@pytest.mark.long
def test_a_package_is_compiled_kept_and_loaded(tmp_path: Path) -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    gm = fused(model, x)
    first = dovetail.lower(gm, [Aoti()], cache=tmp_path, verify=True)
    assert [e.outcome for e in events(first)] == ["compiled"]
    second = dovetail.lower(gm, [Aoti()], cache=tmp_path, verify=True)
    assert [e.outcome for e in events(second)] == ["disk"]
    with torch.no_grad():
        assert torch.allclose(first(x), model(x), atol=1e-6)
        assert torch.equal(first(x), second(x))
        wider = torch.randn(5, 8)
        with pytest.raises(dovetail.CallMismatch):
            second(wider)
