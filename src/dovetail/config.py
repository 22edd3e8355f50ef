"""Settings for all of dovetail in this process, read whenever they are needed.

`recompile_limit`: how often a compiled model is captured, and one body of a lowered graph compiled, for calls that no
earlier code is for, where `recompile_limit=` is not given; then they run uncompiled.

`replay_layers`: whether repeated layers of a model that differ in nothing that their code reads but their weights are traced
twice and then written from those traces, which is faster for deep models and gives the same graph. By default, "checked", that is
done in captures that are compared with the model (those of `compile`, and `capture(..., check_capture=True)`); True does it in all
captures, False in none.
"""

from typing import Literal

recompile_limit: int = 8
replay_layers: Literal["checked"] | bool = "checked"
