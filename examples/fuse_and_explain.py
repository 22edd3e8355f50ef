"""Fuse a model by a rule of your own and the library's, and read what was decided: `python examples/fuse_and_explain.py`.

For who decides what is fused. Nothing is compiled: a fused graph runs as it is, with the same bits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.rules import library


class Mixer(nn.Module):
    """Norm, two projections, and a gate that no library rule knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.value, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.value(y) * torch.exp(-F.softplus(self.gate(y)))


@dovetail.rule(kind="acme.decay_gate")
def decay_gate(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    """The function is the pattern: it is found however the model spells it."""
    return F.linear(x, w, b) * torch.exp(-F.softplus(F.linear(x, v, c)))


@decay_gate.guard
def fits(match: dovetail.Match) -> dovetail.Decline | None:
    width = match["w"].shape[0]
    return (
        None if width % 8 == 0 else dovetail.Decline(f"a width of {width} is no multiple of 8", at=match["w"])
    )


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16, 32)
    model = nn.Sequential(Mixer(32), Mixer(32), nn.Linear(32, 30), Mixer(30)).eval()
    gm = dovetail.capture(model, (x,))
    fused = dovetail.fuse(gm, [decay_gate, library.NORMS, dovetail.rules.groups()])
    assert torch.equal(fused(x), model(x))
    assert dovetail.text(dovetail.inline(fused)) == dovetail.text(gm)

    # The page: what became regions, what did not and why.
    ledger = dovetail.explain(fused)
    print(ledger)

    # Why is the third mixer not fused like the others?
    for refusal in ledger.declined(rule="decay_gate"):
        print(f"\n{refusal.place}: {refusal.reason}")
    print(ledger.why_not("3.gate", "3.value"))

    # What the user says has the last word.
    forced = dovetail.fuse(gm, [decay_gate, library.NORMS], never=["0.*"], limits=dovetail.Limits(nodes=6))
    print([(region.kind, region.nodes[0]) for region in dovetail.regions(forced)])


if __name__ == "__main__":
    main()
