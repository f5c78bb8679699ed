"""How much memory a rank holds for what it has in use, after many batches of different lengths.

    python benchmarks/commands/resident.py [--epochs 12] [--ranks 1] [--out OUT] [--keep-heap]

Trains `tiny` on synthetic speech (made once in OUT) and reads every rank's resident memory once a second,
from the first evaluation on.  In use is what stays resident at the end once the C library has given back what
is free, which every run records.  --keep-heap trains as if nothing were given back meanwhile, for comparison.

Last line: JSON {"resident_vs_live": of the rank with most, the median of its resident memory in the last
quarter of the run over what it has in use, "peak_vs_live": ..., "live_mb": ...}.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.data.data_wait import prepare
from speechdp.experiments.jobs import JobStarter
from speechdp.launching.command import own_program
from speechdp.launching.processes import descendants

_HOURS = 0.3
_KEEPING = (
    "import sys, speechdp.process.heap as heap; heap.EVERY_S = float('inf'); "
    "from speechdp.cli.main import main; sys.argv[0] = 'speechdp'; main()"
)


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process; None: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return None
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def train(data: Path, run_dir: Path, given: argparse.Namespace) -> dict[int, list[int]]:
    """Train; return each large process's resident bytes once a second, from the first evaluation on."""
    shutil.rmtree(run_dir, ignore_errors=True)
    words = ["train", str(data), str(run_dir), "--epochs", str(given.epochs)]
    program = [*own_program(Path(sys.executable))]
    if given.keep_heap:
        program = [sys.executable, "-c", _KEEPING]
    if given.ranks > 1:
        program += ["launch", "-np", str(given.ranks), "--"]
    found: dict[int, list[int]] = {}
    with (run_dir.parent / "train.log").open("wb") as log:
        child = subprocess.Popen([*program, *words], stdout=log, stderr=subprocess.STDOUT)
        while child.poll() is None:
            if (run_dir / "metrics.jsonl").exists():
                for pid in (child.pid, *descendants(child.pid)):
                    held = resident_bytes(pid)
                    if held is not None and held > 150e6:  # neither launchers nor what they start besides
                        found.setdefault(pid, []).append(held)
            time.sleep(1.0)
    if child.returncode != 0:
        raise SystemExit((run_dir.parent / "train.log").read_text(errors="replace"))
    return found


def main() -> None:
    """Train, print the course of the largest rank and the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--keep-heap", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "speechdp-resident")
    given = parser.parse_args()
    if given.keep_heap and given.ranks > 1:
        raise SystemExit("--keep-heap: on one rank only; leave out --ranks")
    given.out.mkdir(parents=True, exist_ok=True)
    data, run_dir = given.out / "data", given.out / "run"
    prepare(data, "features", _HOURS, JobStarter(own_program(Path(sys.executable)), dict(os.environ), ()))
    courses = train(data, run_dir, given)
    course = max(courses.values(), key=statistics.median)
    for number in range(8):
        part = course[len(course) * number // 8 : len(course) * (number + 1) // 8] or course[-1:]
        print(f"eighth {number + 1}: {min(part) / 1e6:.0f} to {max(part) / 1e6:.0f} MB")
    timing = json.loads((run_dir / "timing.json").read_text())
    live = max(rank["memory"]["live_rss_bytes"] for rank in timing["ranks"])
    figures = {
        "resident_vs_live": statistics.median(course[-max(1, len(course) // 4) :]) / live,
        "peak_vs_live": max(course) / live,
        "live_mb": live / 1e6,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
