"""The names under which dovetail stores facts in `node.meta` and `gm.meta`, each with its one writer."""

REGION = "dovetail.region"
"""The `node.meta` key of a region's call, a `RegionCall`. Written by `outlining.region` alone."""
OUTLINING = "dovetail.outlining"
"""The `gm.meta` key of names and ranks, an `OutlineState`. Written by `outlining.region` alone."""
CANONICAL = "dovetail.canonical"
"""The `gm.meta` key of the report of canonicalization; only captured graphs have it."""
DECLARED = "dovetail.effects"
"""The `gm.meta` key of effects that users declared of targets. Written by `ir.effects` alone."""
CLONE = "dovetail.clone"
"""The `node.meta` key of a clone that is returned in place of its original. Written by `outlining.region` alone."""
LEDGER = "dovetail.ledger"
"""The `gm.meta` key of what was fused, what was not, and why. Written by `fusion.ledger` alone."""
LOWERING = "dovetail.lowering"
"""The `gm.meta` key of what runs which region, a `CodeProvider` with `events`. Written by `lowering.lower` alone."""
ORIGIN = "dovetail.origin"
"""The key in `node.meta["custom"]` of the operation that a traced node came from. Written by
`rules.patterns.normalized_graph` alone."""
DRAWS_IN_PLACE = "dovetail.draws_in_place"
"""The key in `node.meta["custom"]` of random draws to be made in place again after decomposition. Written by
`frontend.mutation_fixups` alone, and removed from captured graphs."""
DERIVED = "dovetail.derived"
"""The `gm.meta` key of buffers that were computed from weights, `Derivation`s. Written by `passes.fold_constants` alone."""
REPLAYED = "dovetail.replayed"
"""The `gm.meta` key of the layers that were copied, by path: the path of the layer that was traced. Written by
`frontend.capture` alone, and removed once the graph is compared with the model."""
OPERATORS = "dovetail.operators"
"""The `gm.meta` key of digests of the operators that the model ran when the graph was compared with it, by whether gradients
were enabled. Written by `frontend.check_capture` alone."""
DIM_NAMES = "dovetail.dim_names"
"""The `gm.meta` key of the names of sizes given as `torch.export.Dim`, by input and dimension as in "x:0". Written by
`frontend.capture` alone."""
