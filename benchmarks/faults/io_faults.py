"""Every operation on a file fails in turn, on every rank, with every error: does a run always end well?

    python benchmarks/faults/io_faults.py [--sample N --seed S] [--repeats N] [--commands train,resume,...]
                                   [--jobs 3] [--out FILE.jsonl] [--schedules N] [--keep FOLDER]
    python benchmarks/faults/io_faults.py --only 'train 0 fsync RUN/.run.json.*.tmp 1 EIO once'

A point is an operation (open, write, sync, rename, ...) of a process of a command (tests/faults/cases.py),
an error, and whether it comes once or lasts.  A try takes about a second: its processes are forked from one
that has imported everything.  Right is: the command goes on and leaves what it leaves without a fault, to the
bit; or all its processes end with one line that names the file and a remedy for this error, and repeating it
leaves just that.  Never a traceback, never exit code 0 with anything else (tests/faults/verdict.py).

Then runs under random delays in every exchange, message and file operation (tests/faults/schedules.py).

Verdicts are appended to --out; what stands there already is not tried again, so that it may be stopped and
started.  A point that went wrong is printed with the command that repeats it, its files stay in --keep.
Last line: JSON {"points": ..., "wrong": ..., "hung": ..., "schedules": ..., "differing": ...}.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.faults.cases import Cases
from tests.faults.driver import Driver, Verdict
from tests.faults.fork_server import ForkServer, fork_server, why_no_shim
from tests.faults.points import Operation, Point, points

#: Cases whose points take 0.5 s; those that start launchers take 5 to 60 s and are sampled.
ALL = (
    *("train", "resume", "train-alone", "train-averaging", "train-realign"),
    *("prepare", "prepare-synthetic", "shard", "decode", "report", "sweep"),
)
LAUNCHED = ("train-mpi", "train-horovod", "compare", "compare-rank", "tune")
_LAUNCHED_SAMPLE = 40


class Record:
    """What came of each point, kept in a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.seen: dict[str, dict[str, object]] = {}
        if path is not None and path.is_file():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self.seen[entry["point"]] = entry

    def add(self, case: str, verdict: Verdict) -> None:
        """Note a verdict; print it if something was wrong."""
        name = f"{case} {verdict.point}"
        self.seen[name] = entry = {
            "point": name,
            "happened": verdict.happened,
            "hung": verdict.hung,
            "wrong": verdict.wrong,
            "seconds": round(verdict.seconds, 2),
        }
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        if verdict.wrong:
            print(f"python benchmarks/faults/io_faults.py --only '{name}'")
            for what in verdict.wrong:
                print(f"    {what}", flush=True)

    def slowest(self, case: str) -> tuple[float, str]:
        """Return the longest that a command of a case took which was refused, in seconds, and its point.

        On an idle machine a command without a fault takes a second or two, so this bounds the time in which
        all ranks end after a fault.
        """
        refused = (entry for entry in self.seen.values() if entry["happened"] == "refused")
        timed = ((float(str(entry.get("seconds", 0))), str(entry["point"])) for entry in refused)
        return max((each for each in timed if each[1].startswith(f"{case} ")), default=(0.0, "none"))

    def count(self) -> dict[str, int]:
        """Return how many points there are, and how many were wrong."""
        wrong = [entry for entry in self.seen.values() if entry["wrong"]]
        hung = sum(bool(entry["hung"]) for entry in wrong)
        return {"points": len(self.seen), "wrong": len(wrong) - hung, "hung": hung}


def thinned(done: Iterable[Operation], repeats: int, rng: random.Random) -> Iterator[Operation]:
    """Return at most `repeats` operations of each kind on each file: the first, the last, others at random.

    A corpus that is made by thousands of writes of one file, say, is one operation thousands of times.
    """
    alike: defaultdict[tuple[int, str, str], list[Operation]] = defaultdict(list)
    for operation in done:
        alike[operation.rank, operation.kind, operation.path].append(operation)
    for each in alike.values():
        if len(each) <= repeats:
            yield from each
        else:
            yield from (each[0], *sorted(rng.sample(each[1:-1], repeats - 2)), each[-1])


def try_case(
    server: ForkServer, cases: Cases, name: str, record: Record, options: argparse.Namespace
) -> Counter[str]:
    """Try a case's points, those that are not in the record; return what happened how often."""
    driver = Driver(server, cases.make(name), options.keep)
    rng = random.Random(f"{options.seed} {name}")
    done = driver.learn()
    every = list(points(thinned(done, options.repeats, rng) if options.repeats else done))
    limit = options.sample or (_LAUNCHED_SAMPLE if name in LAUNCHED else len(every))
    chosen = sorted(rng.sample(every, min(limit, len(every))))
    rng.shuffle(chosen)  # whatever is wrong with one operation is soon seen
    left = [point for point in chosen if f"{name} {point}" not in record.seen]
    begun, happened = time.monotonic(), Counter[str]()
    for verdict in driver.try_points(left, 1 if name in LAUNCHED else options.jobs):
        record.add(name, verdict)
        happened[verdict.happened] += 1
        happened["wrong"] += bool(verdict.wrong)
    seconds = time.monotonic() - begun
    print(f"{name}: {len(every)} points, {len(left)} tried in {seconds:.0f} s: {dict(happened)}", flush=True)
    print("    the slowest refusal took {:.1f} s: {}".format(*record.slowest(name)), flush=True)
    return happened


def try_one(server: ForkServer, cases: Cases, text: str, keep: Path) -> int:
    """Try one point again, print what came of it, and keep its files; return the exit code."""
    name, _, point = text.partition(" ")
    driver = Driver(server, cases.make(name), keep, keep_all=True)
    driver.learn()
    verdict = driver.try_point(Point.parse(point))
    print(f"{verdict.happened}; {'; '.join(verdict.wrong) or 'all is well'}; its files: {keep}")
    return int(bool(verdict.wrong))


def _schedules(num: int, seed: int) -> dict[str, int]:
    from tests.faults.schedules import fuzz_schedules  # noqa: PLC0415  only where they are wanted

    number, differing = fuzz_schedules(num, seed, print_line=lambda line: print(line, flush=True))
    return {"schedules": number, "differing": len(differing)}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=0, help="points of each command, at random; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--repeats", type=int, default=0, help="of one operation on one file, 3 or more; 0: all"
    )
    parser.add_argument("--commands", default=",".join((*ALL, *LAUNCHED)), help="cases, separated by commas")
    parser.add_argument("--jobs", type=int, default=(os.cpu_count() or 1) + 1, help="points at a time")
    parser.add_argument("--out", type=Path, help="file of verdicts, to go on with")
    parser.add_argument("--schedules", type=int, default=1000, help="runs under random delays")
    parser.add_argument("--keep", type=Path, help="folder for the files of what went wrong")
    parser.add_argument("--only", help="one point, as it was printed")
    return parser.parse_args()


def main() -> int:
    """Try all points, then all schedules."""
    options = _parse()
    reason = why_no_shim()
    if reason is not None:
        raise SystemExit(f"io_faults: {reason}")
    options.keep = options.keep or Path(tempfile.mkdtemp(prefix="speechdp-io-faults-"))
    options.keep.mkdir(parents=True, exist_ok=True)
    record = Record(options.out)
    with fork_server() as server, tempfile.TemporaryDirectory(prefix="speechdp-inputs-") as inputs:
        cases = Cases(server, Path(inputs))
        if options.only:
            return try_one(server, cases, options.only, options.keep)
        for name in [name for name in options.commands.split(",") if name]:
            try_case(server, cases, name, record, options)
    result = record.count()
    result |= _schedules(options.schedules, options.seed) if options.schedules else {}
    print(json.dumps(result))
    return int(any(result.get(name) for name in ("wrong", "hung", "differing")))


if __name__ == "__main__":
    sys.exit(main())
