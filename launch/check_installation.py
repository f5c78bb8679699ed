"""Check a fresh .venv: that all parts can be imported and that every library loads one libmpi.

usage: check_installation.py [LIBRARY]    the libmpi that was chosen; without it: .venv's own

A Horovod of the Python that .venv stands on, built for another MPI, is left out with a line, as by training.
Ends with 3 where a new .venv would be no better, and the line that it prints says what would.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

PARTS = ("torch", "h5py", "kaldi_native_fbank", "kaldifst", "kaldi_decoder", "soundfile", "jiwer", "tyro")


def loaded_mpi_libraries() -> set[Path]:
    """Return the libmpi files this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {
        Path(line.split(maxsplit=5)[-1]) for line in lines if "/libmpi.so" in line
    }  # paths may have blanks


def gpu_remark() -> str | None:
    """Return why torch cannot compute on the GPUs that nvidia-smi sees; None where it can or sees none."""
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None or subprocess.run([nvidia_smi], capture_output=True, check=False).returncode != 0:
        return None
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        return None
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return (
        f"torch {torch.__version__}, built {built}, cannot compute on the GPUs here; choose one for a CUDA "
        "that their driver serves (nvidia-smi shows it) by TORCH_SPEC and PIP_EXTRA_INDEX_URL "
        "(docs/installing.md, GPUs)"
    )


def left_out(horovod: Path) -> bool:
    """Return whether a Horovod is one that training leaves out, and may stay: a line says so.

    Args:
        horovod: its `__init__.py`.
    """
    mismatch = importlib.import_module("speechdp.comm.mpi.abi").other_mpi_of_horovod()
    if mismatch is None or horovod.is_relative_to(sys.prefix):
        return False
    print(
        f"setup: {horovod} of --on-top-of is not used, training uses back-ends mpi and torch: {mismatch}; "
        "to have Horovod, give --mpi that MPI, or let launch/setup build one for .venv"
    )
    return True


def main() -> int:
    for part in PARTS:
        importlib.import_module(part)
    importlib.import_module("torch").zeros(1).numpy()  # fails where torch was built for another numpy
    remark = gpu_remark()
    if remark is not None:
        print(f"setup: {remark}")
    importlib.import_module("mpi4py.MPI")  # initialises MPI as a job of one
    horovod = importlib.util.find_spec("horovod")
    if horovod is not None and not left_out(Path(str(horovod.origin))):
        importlib.import_module("horovod.torch")
    if not Path("/proc/self/maps").exists():
        return 0
    own = Path(sys.argv[1]).resolve().parent if len(sys.argv) > 1 else (Path(sys.prefix) / "lib").resolve()
    strangers = [path for path in loaded_mpi_libraries() if path.resolve().parent != own]
    if strangers and horovod is not None and not Path(str(horovod.origin)).is_relative_to(sys.prefix):
        print(
            f"setup: {horovod.origin} of --on-top-of loads another MPI than that of {own}: {strangers[0]}; "
            f"give --mpi {strangers[0].parent.parent}, or let launch/setup build a Horovod for .venv",
            file=sys.stderr,
        )
        return 3
    if strangers:
        print(f"another MPI than that of {own} is loaded: {strangers[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
