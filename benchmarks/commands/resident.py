"""How much memory a training holds for what it has in use, after many batches of different lengths.

    python benchmarks/commands/resident.py [--epochs 12] [--out OUT] [--keep-heap]

Trains `tiny` on synthetic speech (made once in OUT) in one process, which notes five times a second, from the
first evaluation on, what is resident and what the C library counts as handed out.  Three things can be called
live: what stays resident at the end, once the C library has given back what is free, which every run records;
what is in use at the same instant, which has the activations of the step under way as well: the former,
less what was handed out then, plus what is handed out now; and the most that is in use at any instant, which
is in use again with the next large batch.  --keep-heap trains as if nothing were given back meanwhile, for
comparison.

Last line: JSON {"resident_vs_live": median of the last quarter's resident memory over what is live at the
end, "resident_vs_live_then": median of the same quarter's ratios of each instant, "resident_vs_most_live":
median of the same quarter's resident memory over the most that is in use in it, "peak_vs_live": ...,
"live_mb": ...}.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.data.data_wait import prepare
from speechdp.experiments.jobs import JobStarter
from speechdp.launching.command import own_program

_HOURS = 0.3
_EVERY_S = 0.2
_NOTED = "memory.jsonl"


class _Mallinfo2(ctypes.Structure):
    _NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES.split()]


def _handed_out_bytes() -> int:
    """Return what the C library has handed out and not got back, in its heaps and beside them."""
    counts = ctypes.CDLL(None).mallinfo2
    counts.restype = _Mallinfo2
    found = counts()
    return int(found.uordblks + found.hblkhd)


def train_noting(words: list[str], noted: Path, *, keep_heap: bool) -> None:
    """Train in this process, noting resident and handed-out bytes, and those of when it records the live."""
    from speechdp.cli.main import main as speechdp  # noqa: PLC0415 - torch, in the training's process only
    from speechdp.process import heap  # noqa: PLC0415
    from speechdp.train import run  # noqa: PLC0415

    if keep_heap:
        heap.EVERY_S = float("inf")
    lines = noted.open("w", buffering=1)
    run_dir = Path(words[2])

    def note() -> None:
        while True:
            if (run_dir / "metrics.jsonl").exists():
                lines.write(json.dumps([heap.resident_bytes(), _handed_out_bytes()]) + "\n")
            time.sleep(_EVERY_S)

    measured = run.peak_memory

    def peak_memory(*given: object) -> dict[str, int]:
        found = measured(*given)  # type: ignore[arg-type]
        lines.write(json.dumps({"live": found["live_rss_bytes"], "handed_out": _handed_out_bytes()}) + "\n")
        return found

    run.peak_memory = peak_memory
    threading.Thread(target=note, daemon=True).start()
    sys.argv = ["speechdp", *words]
    speechdp()


def main() -> None:
    """Train, print the course and the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--keep-heap", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "speechdp-resident")
    parser.add_argument("--trains", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    data, run_dir, noted = given.out / "data", given.out / "run", given.out / _NOTED
    if given.trains:
        words = ["train", str(data), str(run_dir), "--epochs", str(given.epochs)]
        train_noting(words, noted, keep_heap=given.keep_heap)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    prepare(data, "features", _HOURS, JobStarter(own_program(Path(sys.executable)), dict(os.environ), ()))
    shutil.rmtree(run_dir, ignore_errors=True)
    with (given.out / "train.log").open("wb") as log:
        ended = subprocess.run([sys.executable, *sys.argv, "--trains"], stdout=log, stderr=log, check=False)
    if ended.returncode != 0:
        raise SystemExit((given.out / "train.log").read_text(errors="replace"))
    lines = [json.loads(line) for line in noted.read_text().splitlines()]
    (end,) = (line for line in lines if isinstance(line, dict))
    course = [tuple(line) for line in lines if isinstance(line, list)]
    live, beside_heap = end["live"], end["live"] - end["handed_out"]
    for number in range(8):
        part = course[len(course) * number // 8 : len(course) * (number + 1) // 8] or course[-1:]
        held, used = zip(*part, strict=True)
        in_use = statistics.median(used) + beside_heap
        print(
            f"eighth {number + 1}: {min(held) / 1e6:.0f} to {max(held) / 1e6:.0f} MB, "
            f"in use {in_use / 1e6:.0f} MB in the median"
        )
    last = course[-max(1, len(course) // 4) :]
    resident = statistics.median(held for held, _ in last)
    figures = {
        "resident_vs_live": resident / live,
        "resident_vs_live_then": statistics.median(held / (used + beside_heap) for held, used in last),
        "resident_vs_most_live": resident / (max(used for _, used in last) + beside_heap),
        "peak_vs_live": max(held for held, _ in course) / live,
        "live_mb": live / 1e6,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
