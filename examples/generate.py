"""Generate with a compiled Llama of transformers: `python examples/generate.py [tokens] [backend]`.

For who serves: `generate` is the model's own, its calls run compiled code. The weights are random, so the text says nothing;
the tokens are those of eager mode. It needs `transformers`.
"""

import sys
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dovetail


def timed(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    return run(), time.perf_counter() - start


def main(tokens: int = 48, backend: str = "inductor") -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    compiled = dovetail.compile(model, backends=backend)
    prompt = torch.randint(1, config.vocab_size, (1, 7))
    options = {"max_new_tokens": tokens, "do_sample": False}

    expected, eager = timed(lambda: model.generate(prompt, **options))
    first, cold = timed(lambda: compiled.generate(prompt, **options))
    again, warm = timed(lambda: compiled.generate(prompt, **options))
    print(f"{tokens} tokens: eager {eager:.2f} s, compiled {cold:.2f} s the first time, {warm:.2f} s again")
    print("the tokens of eager mode:", torch.equal(first, expected) and torch.equal(again, expected))
    # One graph for the prompt, one for every step: the lengths of caches are symbolic.
    print(len(compiled.graphs), "graphs,", len(dovetail.regions(compiled)), "regions")
    print(dovetail.explain(compiled))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 48, *sys.argv[2:3])
