"""The names under which dovetail keeps facts in `node.meta` and `gm.meta`, each with its one writer."""

REGION = "dovetail.region"
"""The `node.meta` key of a region's call; its value has a `headline`. Written by `outlining.record` alone."""

OUTLINING = "dovetail.outlining"
"""The `gm.meta` key of names and ranks; its value has `ranks`. Written by `outlining.record` alone."""

CANONICAL = "dovetail.canonical"
"""The `gm.meta` key of what `capture` brought to one form; only captured graphs have it."""

DECLARED = "dovetail.effects"
"""The `gm.meta` key of what users declared of targets. Written by `graph.declaring` alone."""

CLONE = "dovetail.clone"
"""The `node.meta` key of a clone given back before its original. Written by `outlining.record` alone."""

LEDGER = "dovetail.ledger"
"""The `gm.meta` key of what was fused, what was not, and why. Written by `fusion.ledger` alone."""

LOWERING = "dovetail.lowering"
"""The `gm.meta` key of who runs which region; its value has `execution_graph` and `events`. Written by `lowering` alone."""

ORIGIN = "dovetail.origin"
"""The key in `node.meta["custom"]` of the operation that a traced node came from. Written by `rules.shadow` alone."""

DRAWS_IN_PLACE = "dovetail.draws_in_place"
"""The key in `node.meta["custom"]` of draws to be restored after decomposition, which hands it on. Written by
`graph.capturing.random_draws` alone, and gone from captured graphs."""

DERIVED = "dovetail.derived"
"""The `gm.meta` key of buffers that were computed from weights, and how. Written by `passes.constants` alone."""

DIM_NAMES = "dovetail.dim_names"
"""The `gm.meta` key of the names of sizes given as `torch.export.Dim`, by input and dimension as in "x:0". Written by
`graph.capture` alone."""
