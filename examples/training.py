"""Train a small transformer as it is and compiled, with the same seed: `python examples/training.py [steps] [backend]`.

For who trains: the compiled model has the parameters of the model, so that optimizers and checkpoints know nothing of it.
"""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

import dovetail

WORDS, WIDTH, LENGTH = 32, 32, 12


class Classifier(nn.Module):
    """Says whether a sequence has more tokens of the upper half of the vocabulary than of the lower."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def train(model: nn.Module, run: nn.Module, steps: int) -> list[float]:
    """Train `model` by calling `run`, the model itself or its compiled form; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1)
    torch.manual_seed(0)  # of dropout
    losses: list[float] = []
    for _ in range(steps):
        tokens = torch.randint(0, WORDS, (32, LENGTH), generator=data)
        labels = ((tokens >= WORDS // 2).float().mean(1) > 0.5).long()
        loss = F.cross_entropy(run(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(steps: int = 30, backend: str = "inductor") -> None:
    torch.manual_seed(0)
    model = Classifier().train()
    reference = copy.deepcopy(model)
    compiled = dovetail.compile(model, (torch.randint(0, WORDS, (32, LENGTH)),), backends=backend)
    ours, expected = train(model, compiled, steps), train(reference, reference, steps)
    print(
        f"loss {expected[0]:.3f} -> {expected[-1]:.3f} in eager mode, {ours[0]:.3f} -> {ours[-1]:.3f} compiled"
    )
    print(f"largest difference of a loss: {max(abs(a - b) for a, b in zip(ours, expected, strict=True)):.1e}")
    print(
        {region.kind for region in dovetail.regions(compiled)},
        {r.backend for r in dovetail.regions(compiled)},
    )
    compiled.eval()  # another capture, in eval mode
    with torch.no_grad():
        tokens = torch.randint(0, WORDS, (32, LENGTH))
        print(
            f"{(compiled(tokens).argmax(1) == model.eval()(tokens).argmax(1)).float().mean():.0%} alike in eval mode"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30, *sys.argv[2:3])
