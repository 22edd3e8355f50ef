"""Cache classes of transformers as arguments and results of captured graphs: updated in place, as the model does."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import dovetail

transformers = pytest.importorskip("transformers")


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 50,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **options)).eval()


def tokens(n: int) -> Tensor:
    return torch.randint(0, 50, (1, n))


def state(cache: Any) -> Any:
    """All that a cache holds, as values that can be compared."""
    leaves, spec = pytree.tree_flatten(cache)
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec


def sliding() -> Any:
    model = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            vocab_size=50,
            max_position_embeddings=64,
            sliding_window=4,
            attn_implementation="eager",
            layer_types=["sliding_attention", "full_attention"],
        )
    )
    return model.eval()


def caches_of(kind: str, model: Any) -> Any:
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=16)
    return transformers.DynamicCache(config=model.config)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static", "static sliding"])
def test_a_cache_is_updated_as_by_the_model(kind: str) -> None:
    model = sliding() if "sliding" in kind else llama()
    mine, theirs = (caches_of(kind.split()[0], model) for _ in range(2))
    layers = list(mine.layers)
    for n in (3, 1, 2):
        ids = tokens(n)
        graph = dovetail.capture(model, (ids,), {"past_key_values": copy.deepcopy(mine), "use_cache": True})
        result = graph(ids, past_key_values=mine, use_cache=True)
        expected = model(ids, past_key_values=theirs, use_cache=True)
        assert torch.equal(result.logits, expected.logits)
        assert result.past_key_values is mine
        assert state(mine) == state(theirs)
        assert mine.get_seq_length() == theirs.get_seq_length()
        # Those who hold a layer of the cache see it updated.
        assert all(a is b for a, b in zip(mine.layers, layers, strict=False))


@torch.no_grad()
def test_a_static_cache_is_written_where_it_is() -> None:
    model, ids = llama(), tokens(2)
    cache = caches_of("static", model)
    model(tokens(3), past_key_values=cache, use_cache=True)
    keys = cache.layers[0].keys
    graph = dovetail.capture(model, (ids,), {"past_key_values": copy.deepcopy(cache), "use_cache": True})
    before = keys.clone()
    graph(ids, past_key_values=cache, use_cache=True)
    assert cache.layers[0].keys is keys
    assert not torch.equal(keys, before)


class Logits(nn.Module):
    """Updates the caches that it is given, and does not return them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, ids: Tensor, first: Any, second: Any = None) -> Tensor:
        out = self.model(ids, past_key_values=first, use_cache=True).logits
        if second is not None:
            out = out + self.model(ids, past_key_values=second, use_cache=True).logits
        return out


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2])
def test_caches_that_are_not_returned(count: int, tmp_path: Path) -> None:
    model, ids = Logits().eval(), tokens(3)
    mine, theirs = ([transformers.DynamicCache() for _ in range(count)] for _ in range(2))
    graph = dovetail.capture(model, (ids, *copy.deepcopy(mine)))
    dovetail.save(graph, tmp_path / "caches.pt2")
    again = dovetail.load(tmp_path / "caches.pt2")
    for run in (graph, again):
        ours = copy.deepcopy(mine)
        assert torch.equal(run(ids, *ours), model(ids, *copy.deepcopy(theirs)))
        assert ours[0].get_seq_length() == 3
    theirs_now = copy.deepcopy(theirs)
    model(ids, *theirs_now)
    graph(ids, *mine)
    assert [state(c) for c in mine] == [state(c) for c in theirs_now]


class Rebinding(nn.Module):
    def forward(self, x: Tensor, held: dict[str, Any]) -> Tensor:
        held["cache"].layers = []
        return x + 1


def test_a_cache_inside_of_an_argument_that_changes_is_refused() -> None:
    with pytest.raises(dovetail.CaptureError, match="changes a list, dict or other object"):
        dovetail.capture(
            Rebinding(), (torch.ones(2), {"cache": transformers.DynamicCache(config=llama().config)})
        )


@torch.no_grad()
def test_what_a_cache_contains_goes_by_json() -> None:
    model = sliding()
    cache = caches_of("dynamic", model)
    model(tokens(6), past_key_values=cache, use_cache=True)
    trees_of = dovetail.capture(model, (tokens(1),), {"past_key_values": cache})
    assert trees_of is not None
    leaves, spec = pytree.tree_flatten(cache)
    written = pytree.treespec_dumps(spec)
    assert json.loads(written)
    again = pytree.tree_unflatten(leaves, pytree.treespec_loads(written))
    assert state(again) == state(cache)
    assert again.get_seq_length() == 6
    assert again.layers[0].cumulative_length == 6


@torch.no_grad()
def test_encoder_decoder_caches() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=50)
    model = transformers.T5ForConditionalGeneration(config).eval()
    encoded = model.get_encoder()(tokens(4))
    mine, theirs = (
        transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
        for _ in range(2)
    )
    for _ in range(2):
        ids = tokens(1)
        options = {"encoder_outputs": encoded, "decoder_input_ids": ids, "use_cache": True}
        graph = dovetail.capture(model, (), {**options, "past_key_values": copy.deepcopy(mine)})
        result = graph(**options, past_key_values=mine)
        expected = model(**options, past_key_values=theirs)
        assert torch.equal(result.logits, expected.logits)
        assert result.past_key_values is mine
        assert mine.is_updated == theirs.is_updated
        assert state(mine) == state(theirs)
