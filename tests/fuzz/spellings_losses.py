"""Spellings of cross entropy, and of the gradients of norms and of softmax."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from .references import Family, Spelling
from .spelling_drawing import Drawing, backward_graph

Loss = Callable[..., Tensor]
_LOSSES = ("mean", "sum", "none")


def _targets(d: Drawing, classes: int, *sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, classes, sizes).to(dtype)


def _operator(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    classes = d.any([3, 4])
    rows = d.any([(), (2,), (3,), (2, 3), (2, 2, 4)]) if not d.chance(0.3, "square") else (classes, classes)
    d.tags.add(f"rank{len(rows) + 1}")
    logits = d.tensor(*rows[:1], classes, *rows[1:])
    settings: dict[str, Any] = {"reduction": d.one({f"reduction_{r}": r for r in _LOSSES})}
    probabilities = d.chance(0.2, "probabilities")
    if d.chance(0.3, "label_smoothing"):
        settings["label_smoothing"] = d.float(0.05, 0.5)
    if not probabilities and d.chance(0.3, "ignore_index"):
        settings["ignore_index"] = d.any([0, 1, -1])
    target = torch.softmax(d.tensor(*logits.shape), -1) if probabilities else _targets(d, classes, *rows)
    weight = [d.tensor(classes).abs()] if d.chance(0.3, "weight") else []
    own: dict[str, Loss] = {
        "cross_entropy": lambda x, y, *w: F.cross_entropy(x, y, *w, **settings),
        "upcast": lambda x, y, *w: F.cross_entropy(x.float(), y, *(v.float() for v in w), **settings),
    }
    others = {k: v for k, v in settings.items() if k != "label_smoothing"}
    dim = min(1, len(rows))
    if "label_smoothing" not in settings and not probabilities:
        own |= {
            "nll": lambda x, y, *w: F.nll_loss(F.log_softmax(x, dim), y, *w, **others),
            "nll_method": lambda x, y, *w: F.nll_loss(x.log_softmax(dim=dim - x.dim()), y, *w, **others),
        }
    hostile: dict[str, Loss] = {
        "downcast": lambda x, y, *w: F.cross_entropy(x.bfloat16(), y, *(v.bfloat16() for v in w), **settings),
        "scaled": lambda x, y, *w: F.cross_entropy(x * 2, y, *w, **settings),
    }
    if not probabilities and len(rows) > 0:
        hostile |= {
            "nll_other_dim": lambda x, y, *w: F.nll_loss(F.log_softmax(x, 0), y, *w, **others),
            "nll_of_softmax": lambda x, y, *w: F.nll_loss(torch.softmax(x, 1), y, *w, **others),
        }
    turned = len(rows) == 2 and d.chance(0.3, "classes_last")
    loss = d.mostly(own, hostile)
    if turned and not probabilities:
        logits = logits.movedim(1, -1).contiguous()

        def run(x: Tensor, y: Tensor, *w: Tensor) -> Tensor:
            return loss(x.transpose(1, 2), y, *w)
    elif len(rows) == 2 and not probabilities and d.chance(0.3, "flattened"):
        logits = logits.movedim(1, -1).contiguous()

        def run(x: Tensor, y: Tensor, *w: Tensor) -> Tensor:
            return loss(x.view(-1, classes), y.view(-1), *w)
    else:
        run = loss
    return d.spelling(
        run, (logits, target, *weight), weights=len(weight), symbolic={0: (0,), 1: (0,)} if rows else {}
    )


def _by_hand(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    classes = d.any([3, 4])
    rows = d.any([(3,), (4,), (2, 3), (2, 2, 3)]) if not d.chance(0.25, "square") else (classes,)
    d.tags.add(f"rank{len(rows) + 1}")
    last = len(rows)
    logits, target = d.tensor(*rows, classes), _targets(d, classes, *rows)
    shown: dict[str, Callable[[Tensor], Tensor]] = {
        "unsqueeze": lambda y: y.unsqueeze(-1),
        "none_index": lambda y: y[..., None],
        "reshape": lambda y: y.reshape(*y.shape, 1),
    }
    column = d.one(shown)
    drop = d.mostly(
        {
            "squeeze": lambda x: x.squeeze(-1),
            "squeeze_front": lambda x: x.squeeze(last),
            "view": lambda x: x.view(x.shape[:-1]),
        },
        {"kept": lambda x: x, "squeeze_all": lambda x: x.squeeze(), "select": lambda x: x[..., 0]},
        0.15,
    )
    pick: dict[str, Loss] = {"gather": lambda x, y: drop(x.gather(-1, column(y)))}
    if last == 1:
        pick["index"] = lambda x, y: x[torch.arange(x.shape[0]), y]
        pick["index_constant"] = lambda x, y: x[torch.arange(rows[0]), y]
    hostile_pick: dict[str, Loss] = {}
    if last == 1 and rows[0] == classes:
        hostile_pick["gather_first"] = lambda x, y: drop(x.gather(0, column(y)))
        hostile_pick["index_turned"] = lambda x, y: x[y, torch.arange(x.shape[0])]
        hostile_pick["index_all"] = lambda x, y: x[:, y]
    picked = d.mostly(pick, hostile_pick or pick)
    if "index" in d.tags and d.chance(0.2, "int32"):
        target = target.int()
    each = d.mostly(
        {
            "log_softmax": lambda x, y: -picked(F.log_softmax(x, -1), y),
            "log_softmax_method": lambda x, y: picked(x.log_softmax(dim=last), y).neg(),
            "log_of_softmax": lambda x, y: -picked(torch.log(torch.softmax(x, -1)), y),
            "logsumexp": lambda x, y: torch.logsumexp(x, -1) - picked(x, y),
            "logsumexp_after": lambda x, y: -(picked(x, y) - x.logsumexp(dim=-1)),
        },
        {
            "unsigned": lambda x, y: picked(F.log_softmax(x, -1), y),
            "softmax_first": lambda x, y: -picked(F.log_softmax(x, 0), y),
            "log_sigmoid": lambda x, y: -picked(F.logsigmoid(x), y),
            "log2": lambda x, y: -picked(torch.log2(torch.softmax(x, -1)), y),
            "logsumexp_keepdim": lambda x, y: torch.logsumexp(x, -1, keepdim=True) - picked(x, y)[..., None],
        },
    )
    reduce: Callable[[Tensor], Tensor] = d.mostly(
        {"mean": lambda x: x.mean(), "sum": lambda x: x.sum(), "none": lambda x: x},
        {
            "mean_first": lambda x: x.mean(0),
            "halved": lambda x: x.mean() / 2,
            "mean_keepdim": lambda x: x.mean(-1, True),
        },
    )
    return d.spelling(lambda x, y: reduce(d.inner(each(x, y))), (logits, target), symbolic={0: (0,), 1: (0,)})


def _graph(d: Drawing, loss: Loss, operands: tuple[Tensor, ...], outputs: tuple[int, ...]) -> Spelling:
    """The gradients of a loss as make_fx or AOTAutograd has them."""
    if d.chance(0.2, "aot_module"):
        return Spelling(*backward_graph(loss, operands, outputs), frozenset(d.tags))
    mode = "symbolic" if d.chance(0.15, "symbolic") else "real"
    graph = make_fx(torch.func.grad(loss, argnums=outputs), tracing_mode=mode)(*operands)
    return Spelling(graph, operands, frozenset(d.tags))


def _layer_norm_grad(rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    sizes = d.any([(2, 4), (4, 4), (2, 3, 4), (2, 3, 2, 2)])
    count = d.any([1, 1, 2]) if len(sizes) > 2 else 1
    d.tags.add(f"dims={count}")
    shape, eps = sizes[-count:], d.any([1e-5, 0.1])
    affine = d.any([0, 1, 2])
    d.tags.add(("no_affine", "weight", "bias")[affine])
    weights = [d.tensor(*shape) for _ in range(affine)]

    def loss(x: Tensor, *rest: Tensor) -> Tensor:
        y = F.layer_norm(x, shape, *rest, eps=eps)
        return (y.sin() * x).sum() if through else y.sin().sum()

    through = d.chance(0.3, "residual")
    operands = (d.tensor(*sizes), *weights)
    every = tuple(range(len(operands)))
    outputs = d.any([every, every, (0,), every[-1:], every[1:] or (0,)])
    d.tags.add(f"of_{'_'.join(map(str, outputs))}")
    return _graph(d, loss, operands, outputs)


def _softmax_grad(logarithm: bool, rng: Random) -> Spelling:
    d = Drawing(rng)
    d.precision()
    sizes = d.any([(4, 4), (3, 5), (2, 3, 4), (2, 2, 2, 3), (4,)])
    dim = d.rng.randrange(len(sizes))
    d.tags.add("last" if dim == len(sizes) - 1 else "other_dim")
    name = "log_softmax" if logarithm else "softmax"
    spell = d.mostly(
        {
            "function": lambda x: getattr(F, name)(x, dim),
            "method": lambda x: getattr(x, name)(dim - len(sizes)),
        },
        {
            "wide": lambda x: getattr(F, name)(x, dim, dtype=torch.float32),
            "by_hand": lambda x: x.exp() / x.exp().sum(dim, keepdim=True),
        },
        0.15,
    )
    after: Callable[[Tensor], Tensor] = d.one(
        {
            "sin": torch.sin,
            "square": torch.square,
            "pick": lambda x: x.select(dim, 0),
            "total": lambda x: x * 3,
        }
    )
    return _graph(d, lambda x: after(spell(x)).sum(), (d.tensor(*sizes),), (0,))


_SOFTMAX = frozenset({"last", "other_dim", "bf16", "f64", "symbolic", "aot_module", "function", "method"})

FAMILIES = (
    Family(
        "cross_entropy",
        _operator,
        frozenset(f"reduction_{r}" for r in _LOSSES)
        | {
            "label_smoothing",
            "ignore_index",
            "weight",
            "probabilities",
            "upcast",
            "nll",
            "rank1",
            "rank2",
            "rank3",
        }
        | {"classes_last", "flattened", "bf16", "f64", "symbolic", "make_fx"},
    ),
    Family(
        "cross_entropy_by_hand",
        _by_hand,
        frozenset({"mean", "sum", "none", "gather", "index", "log_softmax", "log_of_softmax", "logsumexp"})
        | {
            "rank2",
            "rank3",
            "rank4",
            "bf16",
            "f64",
            "symbolic",
            "make_fx",
            "unsqueeze",
            "reshape",
            "view",
            "escape",
        },
    ),
    Family(
        "layer_norm_grad",
        _layer_norm_grad,
        frozenset(
            {"dims=1", "dims=2", "no_affine", "weight", "bias", "bf16", "f64", "symbolic", "aot_module"}
        )
        | {"of_0", "of_1", "of_0_1_2", "of_1_2"},
    ),
    Family("softmax_grad", lambda rng: _softmax_grad(False, rng), _SOFTMAX),
    Family("log_softmax_grad", lambda rng: _softmax_grad(True, rng), _SOFTMAX),
)
