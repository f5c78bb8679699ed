"""The run folder of a script: whether a run may begin there, its record, its checkpoints (docs/api.md)."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from speechdp.comm import environment
from speechdp.comm.base import Communicator
from speechdp.comm.startup.world import versions
from speechdp.errors import ConfigError, RunError
from speechdp.files import atomic_path, cannot_be_read, cannot_be_written, is_of_disk
from speechdp.launching.restarts import RESUME_VARIABLE
from speechdp.ownership.claimant import START_VARIABLE
from speechdp.parallel.run_files import RunDirectory
from speechdp.timing.gather import write_timing
from speechdp.timing.gpu import gpu_facts

#: Names the folder in place of the script.
FOLDER = "SPEECHDP_FOLDER"
#: Checkpoints kept: one may be found damaged, or be of a step after which all went wrong.
_KEPT = 2

#: Folders of this process's runs that have not failed: a restarted script clears those of earlier ones only.
_begun_here: set[Path] = set()


class ScriptFolder:
    """A run's folder on one rank, or none: then nothing is written.

    Args:
        path: the same on all ranks; None: no folder.
        comm: the ranks of the run.
    """

    def __init__(self, path: Path | None, comm: Communicator) -> None:
        self.path, self._comm = path, comm
        #: Where this rank writes the record: rank 0, if there is a folder.
        self._record = RunDirectory(path) if path is not None and comm.rank == 0 else None

    def begin(self, facts: dict[str, Any], device: torch.device, *, goes_on: bool) -> Path | None:
        """Write run.json on rank 0; return the path of this rank's timeline.  Collective.

        Args:
            facts: on the run, beside those on the machine and the job.
            device: of this rank.
            goes_on: from a state that the script has loaded.

        Raises:
            ConfigError: the folder holds a run that is not to be touched.
            RunError: it cannot be written.
        """
        if self.path is None:
            return None
        hosts = self._comm.allgather_object(environment.host_name())
        gpus = self._comm.allgather_object(gpu_facts(device))
        refusal = self._comm.broadcast_object(None if goes_on else self._why_not_begin())
        if refusal:
            raise ConfigError(refusal)
        if self._record is not None:
            if not goes_on and self._record.is_begun:
                self._record.clear()
                self._remove_checkpoints(keep=0)
            if not self._record.is_begun:
                self._record.begin({**facts, **_job_facts(self._comm, device, hosts, gpus)})
            _begun_here.add(self.path.resolve())
        self._comm.barrier()
        return self.path / "timeline" / f"rank-{self._comm.rank:04d}.jsonl"

    def _why_not_begin(self) -> str | None:
        """Return on rank 0 why a run cannot begin here, or None."""
        if self._record is None or not self._record.is_begun:
            return None
        folder = self._record.path
        is_told, is_own = bool(os.environ.get(FOLDER)), folder.resolve() in _begun_here
        if is_told and is_own:
            return (
                f"{folder}: {FOLDER} names the folder of one run, and this script trains with a second "
                "DataParallel; make that a script of its own"
            )
        # An earlier start of the same job may have failed in what follows the training.
        is_of_job = self._record.launch() == _launch() != ""
        may_clear = not is_own and (is_of_job or not self._record.is_complete)
        if os.environ.get(RESUME_VARIABLE) == "1" and may_clear:
            return None
        other = f"name another in {FOLDER}" if is_told else "choose another folder"
        return (
            f"{folder}: already holds a run; {other}, remove it, or go on from its last checkpoint with "
            "load_checkpoint"
        )

    def fail(self) -> None:
        """Note that the run has failed, and may begin anew in this process."""
        if self.path is not None:
            _begun_here.discard(self.path.resolve())

    def complete(self, timing: dict[str, Any] | None, step: int) -> None:
        """Write on rank 0 what was timed, and that the run has ended well."""
        if self._record is None or timing is None:
            return
        if all(entry["steps"] > 0 for entry in timing["ranks"]):
            write_timing(self._record.path, timing)
        self._record.complete({"step": step, "host": socket.gethostname()})

    def add_values(self, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl on rank 0."""
        if self._record is not None:
            self._record.add_values(values)

    def go_on_after(self, step: int) -> None:
        """Drop what was recorded after a step, which is taken again."""
        if self._record is not None:
            self._record.truncate_metrics(step)

    # -- checkpoints ------------------------------------------------------------------------------------

    def write_checkpoint(self, state: dict[str, Any], step: int) -> None:
        """Write every rank's state; the folder gets its name when all are on disk.  Collective.

        Raises:
            ConfigError: the run has no folder.
            RunError: a rank cannot write.
        """
        final = self._checkpoints() / f"step-{step:08d}"
        temporary = final.with_suffix(".tmp")
        if self._record is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # of a job that was killed over it
        self._comm.barrier()
        problem = None
        try:
            write_tensors(temporary / f"rank-{self._comm.rank:04d}.pt", state)
        except RunError as error:
            problem = str(error)
        problems = [other for other in self._comm.allgather_object(problem) if other]
        if problems:
            raise RunError(problem or problems[0])
        if self._record is not None:
            try:
                shutil.rmtree(final, ignore_errors=True)  # of a step that is taken again
                temporary.rename(final)
            except OSError as error:
                raise RunError(cannot_be_written(final, error)) from error
            self._remove_checkpoints(keep=_KEPT)
        self._comm.barrier()

    def read_checkpoint(self) -> dict[str, Any] | None:
        """Return this rank's state of the last whole checkpoint; None: there is none.  Collective.

        Raises:
            ConfigError: the run has no folder, or the checkpoint is of another number of ranks.
            RunError: it cannot be read.
        """
        last = [(path.name, len(list(path.glob("rank-*.pt")))) for path in self._whole_checkpoints()[-1:]]
        found = self._comm.broadcast_object(last)
        if not found:
            return None
        name, size = found[0]
        folder = self._checkpoints() / name
        if size != self._comm.size:
            raise ConfigError(
                f"{folder}: is of another number of ranks ({size}) than this job has ({self._comm.size}); "
                "start as many as before"
            )
        path = folder / f"rank-{self._comm.rank:04d}.pt"
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise RunError(cannot_be_read(path, error)) from error
        except Exception as error:  # whatever torch.load finds wrong in a file
            said = " ".join(str(error).split())[:80]
            raise RunError(f"{path}: is damaged ({said}); remove {folder}, then run again") from error
        return state

    def _checkpoints(self) -> Path:
        if self.path is None:
            raise ConfigError("checkpoints are written to the run's folder; give DataParallel folder=")
        return self.path / "checkpoints"

    def _whole_checkpoints(self) -> list[Path]:
        """Return the folders of whole checkpoints, the last one last."""
        found = self._checkpoints().glob("step-*")
        return sorted(path for path in found if re.fullmatch(r"step-\d{8,}", path.name))

    def _remove_checkpoints(self, *, keep: int) -> None:
        whole = self._whole_checkpoints()
        for path in whole[: len(whole) - keep]:
            shutil.rmtree(path, ignore_errors=True)


def write_tensors(path: Path, values: dict[str, Any]) -> None:
    """Write tensors by name, whole or not at all: `.safetensors` as such, anything else by `torch.save`.

    Raises:
        RunError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            if path.suffix == ".safetensors":
                importlib.import_module("safetensors.torch").save_file(values, temporary)
            else:
                # Given a path, torch.save does not say what the disk said.
                with temporary.open("wb") as file:
                    torch.save(values, file)
    except Exception as error:
        if not is_of_disk(error):
            raise
        raise RunError(cannot_be_written(path, error)) from error


def _job_facts(comm: Communicator, device: torch.device, hosts: list[str], gpus: list[Any]) -> dict[str, Any]:
    launch = environment.announced()
    return {
        "backend": comm.backend,
        "device": device.type,
        "size": comm.size,
        "hosts": hosts,
        "gpus": gpus,
        "launcher": None if launch is None else launch.launcher,
        "launch": _launch(),
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
        "script": sys.argv[0],
        "command": [Path(sys.executable).name, *sys.argv],
        "directory": str(Path.cwd()),
    }


def _launch() -> str:
    """Return what names the `speechdp launch` of this process, the same in all its starts; "": none."""
    return os.environ.get(START_VARIABLE, "").partition(":")[0]
