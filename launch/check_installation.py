"""Check a fresh .venv: that all parts can be imported and that every library loads .venv's own libmpi."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

PARTS = ("torch", "h5py", "kaldi_native_fbank", "kaldifst", "kaldi_decoder", "soundfile", "jiwer", "tyro")


def loaded_mpi_libraries() -> set[Path]:
    """Return the libmpi files this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split()[-1]) for line in lines if "/libmpi.so" in line}


def main() -> int:
    for part in PARTS:
        importlib.import_module(part)
    importlib.import_module("mpi4py.MPI")  # initialises MPI as a job of one
    has_horovod = importlib.util.find_spec("horovod") is not None
    if has_horovod:
        importlib.import_module("horovod.torch")
    if not Path("/proc/self/maps").exists():
        return 0
    own = (Path(sys.prefix) / "lib").resolve()
    strangers = [path for path in loaded_mpi_libraries() if path.resolve().parent != own]
    if strangers:
        print(f"another MPI than that of {sys.prefix} is loaded: {strangers[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
