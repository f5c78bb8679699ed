"""Frames/s of our data path beside what else there is for the same: padded batches of the same frames.

    pip install webdataset lhotse kaldi_native_io   # the peers; left out, and said so, where they are missing
    python benchmarks/data/data_path.py [--rounds 5] [--megabytes 600] [--only ours] [--folder FOLDER]

Generated speech features (40 values a frame, utterances of 1 to 20 s) are written once in every format and
are in the page cache before the clock starts.  Each contender delivers the same batches of 32 segments,
(B, T, F) float32 features, (B, T) int64 targets and lengths, in a process of its own, in turn; ratios within
a round, medians over rounds.  What each delivers is added up and compared.  The limit moves the same
bytes and does nothing else: reading the files into one buffer, or copying within memory, whichever is slower.
CPU share is processor time over wall time, worker processes included.

Last line: JSON {"vs_dataloader": ..., "vs_webdataset_or_shar": ..., "vs_ark": ..., "vs_limit": ...}: our
frames/s over those of the best of its kind.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich import box
from rich.table import Table

from benchmarks.data.contenders import READERS, Checksum, Epoch, Task, checksum
from benchmarks.data.corpora import CORPORA, write_corpus
from benchmarks.strategies.paired import Rates, compare, run_job, run_rounds
from speechdp.cli.support.console import make_console
from speechdp.data.shards.dataset import Dataset

DATALOADER, TAR, ARK, LIMIT = "vs_dataloader", "vs_webdataset_or_shar", "vs_ark", "vs_limit"
OURS = "ours"


@dataclass(frozen=True)
class Contender:
    """A reader over a corpus.

    Attributes:
        name: in results.
        reader: of data_contenders.READERS.
        corpus: of data_corpora.CORPORA.
        key: of the last line's JSON; empty for a row of the table only.
        workers, chunk_frames, left_context: as in data_contenders.Task.
        first_epoch: time the first epoch of the process, in which checksums are verified.
        needs: module that must be installed.
    """

    name: str
    reader: str
    corpus: str = "long"
    key: str = ""
    workers: int = 0
    chunk_frames: int = 0
    left_context: int = 0
    first_epoch: bool = False
    needs: str = "torch"

    @property
    def moves_only(self) -> bool:
        """Whether it delivers no batches."""
        return self.reader.startswith("limit")

    @property
    def stored(self) -> str:
        """The format it reads: our shards, or one of data_corpora.FORMATS."""
        return "tars" if self.reader == "webdataset" else self.reader

    def task(self, folder: Path) -> Task:
        """Return what it reads, in the folder of all corpora."""
        return Task(folder / self.corpus, self.workers, self.chunk_frames, self.left_context)


_CHUNKS = {"corpus": "small", "chunk_frames": 20, "left_context": 40}
CONTENDERS = (
    Contender(OURS, "ours"),
    Contender("DataLoader over h5py", "dataloader", key=DATALOADER),
    Contender("DataLoader, 2 workers", "dataloader", key=DATALOADER, workers=2),
    Contender("WebDataset", "webdataset", key=TAR, needs="webdataset"),
    Contender("WebDataset, 2 workers", "webdataset", key=TAR, workers=2, needs="webdataset"),
    Contender("Lhotse Shar", "shar", key=TAR, needs="lhotse"),
    Contender("Lhotse Shar, 2 workers", "shar", key=TAR, workers=2, needs="lhotse"),
    Contender("Kaldi archives", "arks", key=ARK, needs="kaldi_native_io"),
    Contender("Kaldi archives, compressed", "compressed", needs="kaldi_native_io"),
    Contender("reading the files' bytes", "limit_read", key=LIMIT),
    Contender("copying as many bytes", "limit_memcpy", key=LIMIT),
    Contender("ours, first epoch", "ours", first_epoch=True),
    Contender("ours, float16 shards", "ours", "half"),
    Contender("ours, short utterances", "ours", "short"),
    Contender("DataLoader, short utterances", "dataloader", "short"),
    Contender("DataLoader, short, 2 workers", "dataloader", "short", workers=2),
    Contender("WebDataset, short utterances", "webdataset", "short", needs="webdataset"),
    Contender("Kaldi archives, short utterances", "arks", "short", needs="kaldi_native_io"),
    Contender("ours, chunks 20+40", "ours", **_CHUNKS),  # type: ignore[arg-type]
    Contender("DataLoader, chunks 20+40", "dataloader", **_CHUNKS),  # type: ignore[arg-type]
    Contender("DataLoader, chunks, 2 workers", "dataloader", workers=2, **_CHUNKS),  # type: ignore[arg-type]
)
#: How far a sum may be from ours: what is stored in fewer bits comes back rounded.
_TOLERANCE = {"compressed": 1e-3}


def cpu_seconds() -> float:
    """Return the processor time of this process and of its workers so far."""
    total = time.process_time()
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def time_epochs(epoch: Epoch, seconds: float) -> dict[str, float]:
    """Run whole epochs for at least `seconds`; return wall and processor seconds of one."""
    start, cpu, count = time.perf_counter(), cpu_seconds(), 0
    while count == 0 or time.perf_counter() - start < seconds:
        for _ in epoch():
            pass
        count += 1
    return {"wall_s": (time.perf_counter() - start) / count, "cpu_s": (cpu_seconds() - cpu) / count}


def run_contender(arguments: argparse.Namespace) -> dict[str, float]:
    """Be a contender: return an epoch's frames and seconds, and (--check) what was delivered."""
    torch.set_num_threads(1)
    contender = next(c for c in CONTENDERS if c.name == arguments.contender)
    task = contender.task(arguments.folder)
    with ExitStack() as stack:
        epoch = READERS[contender.reader](task, stack)
        if not contender.first_epoch:
            for _ in epoch():
                pass
        times = time_epochs(epoch, 0.0 if contender.first_epoch else arguments.seconds)
        delivered = dataclasses.asdict(checksum(epoch())) if arguments.check else {}
    frames = Dataset.open(task.folder).num_frames("train")
    return {"rate": frames / times["wall_s"], "cpu_share": times["cpu_s"] / times["wall_s"], **delivered}


def start(contender: Contender, arguments: argparse.Namespace, *more: str) -> dict[str, float]:
    """Run this program again as a contender; return its result."""
    command = [sys.executable, __file__, "--contender", contender.name, "--folder", str(arguments.folder)]
    return run_job([*command, "--seconds", str(arguments.seconds), *more], timeout_s=1800)


class Agreement:
    """Compares what contenders delivered from the same corpus with what the first of them did."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], Checksum] = {}

    def check(self, contender: Contender, found: Checksum) -> None:
        """Print what was delivered, or end the benchmark if it is something else."""
        first = self._first.setdefault((contender.corpus, contender.chunk_frames), found)
        near = _TOLERANCE.get(contender.reader, 1e-9)
        same = (found.frames, found.batches) == (first.frames, first.batches) and all(
            math.isclose(getattr(found, name), getattr(first, name), rel_tol=near)
            for name in ("padded_sum", "weighted_sum")
        )
        if not same:
            raise SystemExit(f"{contender.name} delivers {found}, not {first}")
        print(
            f"checked: {contender.name}, {found.frames} frames in {found.batches} batches, "
            f"sum {found.padded_sum:.6e}",
            flush=True,
        )


def available(arguments: argparse.Namespace) -> list[Contender]:
    """Return the contenders that can run here; say which cannot, and what would help."""
    found = []
    for contender in CONTENDERS:
        in_quick = contender.workers == 0 and (contender.key or contender.name == OURS)
        if arguments.only not in contender.name or (arguments.quick and not in_quick):
            continue
        if importlib.util.find_spec(contender.needs) is None:
            print(f"left out: {contender.name} (pip install {contender.needs})", flush=True)
        else:
            found.append(contender)
    return found


def summarise(rates: Rates, contenders: Sequence[Contender]) -> dict[str, float]:
    """Print and return our frames/s over the best peer's of each kind, and over the slower limit's."""
    result = {}
    for key in (DATALOADER, TAR, ARK, LIMIT):
        names = [c.name for c in contenders if c.key == key]
        if names and OURS in rates:
            medians = {name: statistics.median(rates[name]) for name in names}
            choose = min if key == LIMIT else max
            result[key] = compare(rates, OURS, choose(names, key=medians.__getitem__))
    return result


def show(rates: Rates, shares: dict[str, list[float]], megabytes: float) -> None:
    """Print a row for each contender: medians over rounds."""
    table = Table(title=f"Batches of {megabytes:g} MB", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("contender")
    for title in ("frames/s", "CPU share", "frames/s of CPU"):
        table.add_column(title, justify="right")
    for name, values in rates.items():
        rate, share = statistics.median(values), statistics.median(shares[name])
        table.add_row(name, f"{rate:,.0f}", f"{share:.2f}", f"{rate / max(share, 1e-9):,.0f}")
    make_console().print(table)


def measure_all(arguments: argparse.Namespace, contenders: Sequence[Contender]) -> dict[str, float]:
    """Time all contenders, and check in the first round what they deliver; return the ratios."""
    shares: dict[str, list[float]] = {c.name: [] for c in contenders}
    by_name = {c.name: c for c in contenders}
    agreement = Agreement()

    def measure(name: str) -> float:
        contender = by_name[name]
        checked = not shares[name] and not contender.moves_only
        found = start(contender, arguments, *["--check"] * checked)
        if checked:
            fields = {field.name for field in dataclasses.fields(Checksum)}
            agreement.check(contender, Checksum(**{name: found[name] for name in fields}))  # type: ignore[arg-type]
        shares[name].append(found["cpu_share"])
        return found["rate"]

    rates = run_rounds(list(by_name), measure, arguments.rounds, "frames/s")
    show(rates, shares, arguments.megabytes)
    return summarise(rates, contenders)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=600.0, help="of the corpus as float32")
    parser.add_argument("--seconds", type=float, default=1.0, help="least time a contender is timed a round")
    parser.add_argument("--only", default="", help="contenders with this in their name, for experiments")
    parser.add_argument("--quick", action="store_true", help="one round over some batches: see that it runs")
    parser.add_argument("--folder", type=Path, help="where the corpora are written; default: a temporary one")
    parser.add_argument("--contender", default="", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.rounds, arguments.megabytes, arguments.seconds = 1, 2.0, 0.0
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.contender:
        print(json.dumps(run_contender(arguments)))
        return
    contenders = available(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        arguments.folder = Path(folder)
        for name in dict.fromkeys(c.corpus for c in contenders):
            formats = {c.stored for c in contenders if c.corpus == name}
            write_corpus(arguments.folder, CORPORA[name], arguments.megabytes, formats)
        os.sync()  # else the kernel writes gigabytes to the disk while contenders are timed
        results = measure_all(arguments, contenders)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
