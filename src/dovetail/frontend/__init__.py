"""From a model to a functional graph: export, fixups before decomposition, guards on inputs, the calling convention."""
