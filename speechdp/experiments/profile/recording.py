"""Write the records of a profile's job (docs/profile.md)."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from speechdp.comm.environment import host_name
from speechdp.counting import counted
from speechdp.errors import RunError
from speechdp.experiments.profile.common_start import CommonStart
from speechdp.experiments.profile.measured import (
    FACTS_NAME,
    MEMORY_NAME,
    MeasuredMemory,
    Memory,
    StepRecord,
    rank_path,
)
from speechdp.experiments.record import write_json
from speechdp.files import cannot_be_written
from speechdp.launching.cores import available_cores
from speechdp.timing.memory import peak_memory
from speechdp.train.session import Session
from speechdp.train.trainer_state import TrainingParts


def write_steps(session: Session, folder: Path, start: CommonStart, records: list[StepRecord]) -> None:
    """Write this rank's file.  Raises RunError (disk)."""
    rank = session.comm.rank
    lines: list[dict[str, Any]] = [
        {"rank": rank, "host": host_name(), "pid": os.getpid(), "clock_offset_s": start.clock_offset_s}
    ]
    for record in records:
        functions = [[f.name, f.phase, round(f.start_s, 7), round(f.duration_s, 7)] for f in record.functions]
        lines.append({
            "step": record.step, "start_s": round(record.start_s, 7), "wall_s": round(record.wall_s, 7),
            "frames": record.frames, "functions": functions,
        })  # fmt: skip
    path = rank_path(folder, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise RunError(cannot_be_written(path, error)) from error


def write_facts(session: Session, folder: Path, parts: TrainingParts) -> None:
    """Let rank 0 write memory and facts of all ranks.  Collective.  Raises RunError (disk)."""
    comm, device = session.comm, session.device
    replica, on_gpu, peaks = parts.replica, device.type == "cuda", peak_memory(device)
    rss, gpu_peak = peaks["peak_rss_bytes"], peaks.get("gpu_peak_bytes")
    own = MeasuredMemory(
        rank=comm.rank,
        peak_bytes=rss if gpu_peak is None else gpu_peak,
        rss_bytes=rss,
        parameters_bytes=replica.parameters.whole.nbytes + replica.gradients.whole.nbytes,
        optimizer_bytes=sum(x.nbytes for x in replica.optimizer_tensors().values()),
        gpu_peak_bytes=gpu_peak,
    )
    ranks = tuple(MeasuredMemory(**each) for each in comm.allgather_object(asdict(own)))
    cpus = comm.allgather_object(describe_cpu())
    if comm.rank == 0:
        write_json(folder / MEMORY_NAME, asdict(Memory("gpu" if on_gpu else "rss", ranks)))
        facts = {
            **session.facts,
            "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
            "cpus": cpus,
            "backend": comm.backend,
            "threads": torch.get_num_threads(),
            "num_parameters": sum(p.numel() for p in parts.model.parameters()),
        }
        write_json(folder / FACTS_NAME, facts)
    comm.barrier()


def describe_cpu() -> str:
    """Return the CPU of this host and the cores that this process may use, e.g. "EPYC 7763, 16 cores".

    If Linux does not name the model, the architecture is used.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(models or [platform.machine()])[0]}, {counted(available_cores(), 'core')}"
