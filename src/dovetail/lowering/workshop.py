"""How code is made: the tools that the options of a lowering stand for."""

from __future__ import annotations

from dovetail.lowering.artefacts import Workshop
from dovetail.lowering.cache import open_cache
from dovetail.lowering.options import Options
from dovetail.lowering.verify import verify_unit
from dovetail.lowering.workers import Workers


def workshop_of(options: Options) -> Workshop:
    """The tools for some options."""
    cache = open_cache(options.cache)
    verify = verify_unit if options.verify else None
    return Workshop(store=cache, verify=verify, isolated=Workers(options.timeout, cache))
