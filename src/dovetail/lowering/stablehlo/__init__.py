"""StableHLO: graphs in the language that XLA and others read."""
