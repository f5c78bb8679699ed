"""Does anything but speechdp's own errors come out of its readers, whatever stands in the files?

    python benchmarks/faults/fuzz.py [--inputs 120000] [--seed 0] [--only NAME ...] [--show]

Draws damaged and odd files (hypothesis) for every reader of fuzz_readers.py, and lets it read them
in a process of its own with 8 GiB of memory.  Prints a record a reader: JSON {"reader":, "inputs":, "read":,
"refused":, "escaped":, "crashed":, "hung":, "longest_s":}; `escaped` are exceptions that are none of ours and
messages of more than one line, `crashed` ends of the process, `hung` reads of more than 20 s.  Exit code 1 if
there is any of these; --show prints what they were.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.faults.fuzz_files import Files, Reader
from benchmarks.faults.fuzz_readers import make_readers

#: No time limit, no shrinking, no memory of earlier runs.
SETTINGS = settings(
    database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)

#: Inputs a hypothesis run: it remembers them all.
_BLOCK = 1000
_MEMORY_BYTES = 8 << 30
_LONGEST_S = 20


@dataclass
class Tally:
    """What came of the inputs of one reader."""

    reader: str
    inputs: int = 0
    read: int = 0
    refused: int = 0
    escaped: int = 0
    crashed: int = 0
    hung: int = 0
    longest_s: float = 0.0
    seen: dict[str, int] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Add what another process counted."""
        for name in ("inputs", "read", "refused", "escaped", "crashed", "hung"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest_s = max(self.longest_s, other.longest_s)
        for text, times in other.seen.items():
            self.note(text, times)

    def note(self, text: str, times: int = 1) -> None:
        """Remember what was wrong."""
        self.seen[text] = self.seen.get(text, 0) + times

    @property
    def is_clean(self) -> bool:
        """Whether only our own errors came out."""
        return not (self.escaped or self.crashed or self.hung)


def fuzz_block(reader: Reader, folder: Path, number: int, num_inputs: int, notes: Path) -> Tally:
    """Let a reader read a block of inputs; what is being read stands in `notes`, should the process end."""
    tally = Tally(reader.name)

    @seed(number)
    @settings(SETTINGS, max_examples=num_inputs)
    @given(reader.inputs)
    def read(changed: Files) -> None:
        tally.inputs += 1
        notes.write_text(json.dumps(asdict(tally)))
        signal.alarm(_LONGEST_S)
        start = time.perf_counter()
        try:
            error = reader.refusal(folder, changed)
        except BaseException as escaped:
            tally.escaped += 1
            where = traceback.extract_tb(escaped.__traceback__)[-1]
            tally.note(f"{type(escaped).__name__} at {where.filename}:{where.lineno}: {str(escaped)[:80]!r}")
            return
        finally:
            tally.longest_s = max(tally.longest_s, time.perf_counter() - start)
            signal.alarm(0)
        tally.read += error is None
        tally.refused += error is not None
        if error is not None and not str(error).isprintable():
            tally.escaped += 1
            tally.note(f"message of {type(error).__name__}: {str(error)[-120:]!r}")

    read()
    return tally


def fuzz(name: str, num_inputs: int, first_seed: int) -> Tally:
    """Fuzz a reader in a process of its own, a block of inputs a time; another follows one that ended."""
    total = Tally(name)
    number, end = 0, -(-num_inputs // _BLOCK)
    while number < end:
        with tempfile.TemporaryDirectory(prefix="speechdp-fuzz-", dir=_fast_disk()) as scratch:
            blocks = f"{number}:{end}:{min(_BLOCK, num_inputs)}:{first_seed}"
            command = [sys.executable, __file__, "--worker", name, "--blocks", blocks, "--scratch", scratch]
            code = subprocess.run(command, check=False).returncode
            done = [json.loads(line) for line in (Path(scratch) / "tallies").read_text().splitlines()]
            for tally in done:
                total.add(Tally(**tally))
            number += len(done)
            if code == 0:
                break
            ended = json.loads((Path(scratch) / "notes").read_text())
            total.add(Tally(**ended))
            hung = code == -signal.SIGALRM
            total.hung += hung
            total.crashed += not hung
            total.note(f"process ended by {-code} in block {number}, input {ended['inputs']}")
            number += 1
    return total


def work(name: str, blocks: str, scratch: Path) -> None:
    """Be the process that reads."""
    first, end, num_inputs, first_seed = map(int, blocks.split(":"))
    (scratch / "tallies").touch()
    (scratch / "sound").mkdir()
    (reader,) = (reader for reader in make_readers(scratch / "sound") if reader.name == name)
    folder = scratch / "read"
    folder.mkdir()
    reader.write(folder)
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in range(first, end):
        tally = fuzz_block(reader, folder, number + first_seed * end, num_inputs, scratch / "notes")
        with (scratch / "tallies").open("a") as file:
            file.write(json.dumps(asdict(tally)) + "\n")


def _fast_disk() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _names() -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        return [reader.name for reader in make_readers(Path(scratch))]


def main() -> int:
    """Fuzz all readers, or those named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=120_000, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of readers")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.blocks, arguments.scratch)
        return 0
    names = arguments.only or _names()
    total = Tally("all")
    for name in names:
        tally = fuzz(name, -(-arguments.inputs // len(names)), arguments.seed)
        _print(tally, show=arguments.show)
        total.add(tally)
    _print(total, show=False)
    return 0 if total.is_clean else 1


def _print(tally: Tally, *, show: bool) -> None:
    record = {name: value for name, value in asdict(tally).items() if name != "seen"}
    print(json.dumps({**record, "longest_s": round(tally.longest_s, 3)}), flush=True)
    if show:
        for text, count in sorted(tally.seen.items(), key=lambda item: -item[1])[:20]:
            print(f"    {count} x {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
