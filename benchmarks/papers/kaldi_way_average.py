"""Average models on disk, as nnet3-average does: read them all, write their mean.

    python benchmarks/papers/kaldi_way_average.py SPAWNED_S REPORT OUT MODEL MODEL...

Needs numpy only: importing torch would take most of its time.  SPAWNED_S is the monotonic clock when the
process was asked for; REPORT receives the times.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy

_BEGUN_S = time.monotonic()  # all is imported: before this the process was starting


def average(models: Sequence[Path], out: Path) -> None:
    """Write the mean of models with the same tensors, all weighted alike."""
    weights = [safetensors.numpy.load_file(path) for path in models]
    mean = {
        name: np.mean([each[name] for each in weights], axis=0, dtype=np.float64).astype(first.dtype)
        for name, first in weights[0].items()
    }
    safetensors.numpy.save_file(mean, out)


def main(arguments: Sequence[str]) -> None:
    """Average; leave the times for the driver."""
    spawned_s, report, out, *models = arguments
    average([Path(model) for model in models], Path(out))
    done_s = time.monotonic()
    seconds = {"start": _BEGUN_S - float(spawned_s), "average": done_s - _BEGUN_S}
    Path(report).write_text(json.dumps({"seconds": seconds, "done_s": done_s}))


if __name__ == "__main__":
    main(sys.argv[1:])
