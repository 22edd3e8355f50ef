"""Settings for all of dovetail in this process, read whenever they are needed.

`recompile_limit`: how often a compiled model is captured, and one body of a lowered graph compiled, for calls that no
earlier code is for, where `recompile_limit=` is not given; then they run uncompiled.
"""

recompile_limit: int = 8
