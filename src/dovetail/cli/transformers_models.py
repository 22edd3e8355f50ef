"""Small models of transformers, by model type: random weights, and a call that runs."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from dovetail.cli.transformers_config import build_model, config_fields, model_class, small_configs
from dovetail.cli.transformers_inputs import calls, with_placeholders
from dovetail.errors import InvalidArgument, did_you_mean
from dovetail.frontend.cache_pytrees import register_caches

_MOST_TRIES, _MOST_SECONDS = 40, 10.0


class InvalidConfiguration(ValueError):
    """No configuration of a type takes the values that its fields were given."""


@dataclass(frozen=True)
class SmallModel:
    """A model that was called once, a copy that never was, the call, and how the configuration was shrunk."""

    model: nn.Module
    uncalled: nn.Module
    kwargs: dict[str, Any]
    shrinker: str


def small_model(model_type: str, fields: Mapping[str, Any] | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Return the base model of a type, of a few layers and small widths, and keyword arguments that it runs with.

    `fields` are set in the small configuration. The random state of the process is as before.
    """
    names = config_fields(model_type)
    for name in fields or {}:
        # Configurations take any keyword, also those that nothing reads.
        if name not in names:
            raise InvalidArgument(
                f"the configuration of '{model_type}' has no '{name}'. {did_you_mean(name, names)}"
            )
    with torch.random.fork_rng(devices=[]):
        try:
            small = first_model_that_runs(model_type, {"config": dict(fields or {})})
        except InvalidConfiguration as error:
            if not fields:
                raise
            raise InvalidArgument(f"--config of 'hf:{model_type}': {error}.") from error
    return small.model, small.kwargs


def first_model_that_runs(model_type: str, overrides: Mapping[str, Any]) -> SmallModel:
    """Return a model of the smallest configuration that can be built and called.

    `overrides` may have fields of the configuration (`config`), arguments of the one that is shrunk (`base`), and the
    call (`inputs`). Raises ValueError with the reasons of all that failed, InvalidConfiguration if none can be built.
    """
    cls = model_class(model_type)
    if cls is None:
        raise ValueError("transformers has no model class for it")
    reasons: list[str] = []
    is_valid = False
    for name, build in small_configs(model_type, overrides):
        try:
            config = build()
            is_valid = True
            model = build_model(cls, config)
            uncalled = copy.deepcopy(model)
            register_caches()  # a model may bring a cache class of its own
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        kwargs = _call_that_runs(model, config, overrides.get("inputs", {}), reasons)
        if kwargs is not None:
            return SmallModel(model, uncalled, kwargs, name)
    text = " | ".join(dict.fromkeys(reasons))[:1500]
    raise ValueError(text) if is_valid else InvalidConfiguration(text)


def _call_that_runs(
    model: nn.Module, config: Any, given: Mapping[str, Any], reasons: list[str]
) -> dict[str, Any] | None:
    tries, start = 0, time.process_time()
    for kwargs in calls(model, config, dict(given)):
        trial: dict[str, Any] | None = kwargs
        for _ in range(3):
            tries += 1
            if trial is None or tries > _MOST_TRIES or time.process_time() - start > _MOST_SECONDS:
                break
            try:
                torch.manual_seed(0)
                with torch.no_grad():
                    results = model(**pytree.tree_map(_clone, trial))
                try:
                    leaves = pytree.tree_leaves(results)
                except Exception:
                    trial["use_cache"] = False
                    with torch.no_grad():
                        leaves = pytree.tree_leaves(model(**pytree.tree_map(_clone, trial)))
                if not any(isinstance(v, Tensor) or hasattr(v, "__dict__") for v in leaves):
                    raise ValueError("no tensor among the results")
                return trial
            except Exception as error:
                line = f"{'+'.join(trial)}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                reasons.append(line)
                trial = with_placeholders(trial, config, str(error))
    return None


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
