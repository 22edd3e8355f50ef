"""The store without torch: imported by short-lived processes, which would spend their time on importing torch."""

import sys
import types
from pathlib import Path

if "dovetail" not in sys.modules:
    package = types.ModuleType("dovetail")
    package.__path__ = [str(Path(__file__).parents[2] / "src" / "dovetail")]
    sys.modules["dovetail"] = package

from dovetail.errors import StoreError as StoreError
from dovetail.tuning.environment import Environment as Environment
from dovetail.tuning.store import Measurement as Measurement
from dovetail.tuning.store import Store as Store
from dovetail.tuning.store import Subject as Subject

if "torch" in sys.modules and not hasattr(sys.modules["dovetail"], "__file__"):
    raise ImportError("the store imports torch")
