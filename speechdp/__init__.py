"""Data-parallel training of speech models over N ranks, with a choice of averaging strategy and period.

For your own model and loop: `run_ranks` and `DataParallel`.  For a model trained by the commands:
`AcousticModel` and `SynthesisModel` (docs/api.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speechdp.data.corpora.reader import corpus
    from speechdp.parallel.data_parallel import DataParallel
    from speechdp.parallel.ranks import run_ranks
    from speechdp.parallel.registry import strategy
    from speechdp.tasks.registry import task
    from speechdp.trained import AcousticModel, SynthesisModel

__version__ = "0.1.0"
__all__ = ["AcousticModel", "DataParallel", "SynthesisModel", "corpus", "run_ranks", "strategy", "task"]

#: Modules of the public names.  They are imported on first use, so that `import speechdp` does not load
#: torch.
_MODULES = {
    "AcousticModel": "speechdp.trained",
    "DataParallel": "speechdp.parallel.data_parallel",
    "SynthesisModel": "speechdp.trained",
    "corpus": "speechdp.data.corpora.reader",
    "run_ranks": "speechdp.parallel.ranks",
    "strategy": "speechdp.parallel.registry",
    "task": "speechdp.tasks.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'speechdp' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
