"""Pattern rules: a function traced to a template, searched for and proven on the operands of each match."""
