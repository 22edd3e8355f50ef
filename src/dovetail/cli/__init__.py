"""The command `dovetail`; typer and rich, which it needs, are imported only by running it."""
