"""Schedule a Hugging Face BERT: find its parts, fuse and replace them step by step, and check every step.

Run it with `python examples/schedule_bert.py`. It needs `transformers`; the weights are random.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertConfig, BertModel

import dovetail
from dovetail.rules import library


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float = dovetail.Const()) -> Tensor:
    """What to look for: attention as this model writes it, whatever the scale."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """What to call instead: any function or module with the same inputs and outputs, a kernel of one's own say."""
    scores = q @ k.transpose(-1, -2) * scale
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v


config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
model = BertModel(config).eval()
ids = torch.randint(0, config.vocab_size, (2, 16))
mask = torch.ones(2, 16, dtype=torch.long)
mask[0, 12:] = 0

s = dovetail.schedule(model, (ids,), {"attention_mask": mask})
layers = s["encoder.layer.*"]
with s.verifying():
    # Fake fusion: regions that compute exactly what the operations did, for a compiler that comes later.
    s.fuse(layers.find(library.NORMS))
    # Fused and compiled at once.
    s.fuse(layers.find(library.LINEAR), backends="torchscript")
    # Replaced, one after the other: shapes, dtypes and, with `check`, values are compared before anything is edited.
    for match in layers.find(attention):
        s.replace(by_hand, match, concrete_args={"scale": match["scale"]}, check=True)

s.print()
print(s.verify())
built = s.build()
print(built(ids, attention_mask=mask).last_hidden_state.shape)
