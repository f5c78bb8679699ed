"""What is fuzzed: every reader of files that speechdp has."""

from __future__ import annotations

from pathlib import Path

from benchmarks.faults.fuzz_data import data_readers
from benchmarks.faults.fuzz_files import Reader
from benchmarks.faults.fuzz_kaldi import kaldi_readers
from benchmarks.faults.fuzz_records import launch_readers, model_readers, run_readers


def make_readers(scratch: Path) -> list[Reader]:
    """Return all readers; their sound files are made in `scratch`."""
    return [
        *data_readers(scratch),
        *model_readers(scratch),
        *kaldi_readers(scratch),
        *launch_readers(),
        *run_readers(scratch),
    ]
