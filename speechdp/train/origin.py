"""Where a run comes from: what is needed, besides its options, to repeat it (run.json, starts.jsonl)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speechdp.launching.variables import HOSTFILE, HOSTS, LAUNCH, RESTART_REASON
from speechdp.ownership.batch_job import find_batch_job
from speechdp.train.session import Session

_GIT_TIMEOUT_S = 3.0
_MOST_BYTES = 1 << 20
_SETTINGS = re.compile(
    r"(OMP|MKL|OPENBLAS|GOTO)_NUM_THREADS|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING)|CUBLAS_\w+"
    r"|(HOROVOD|NCCL|UCX|GLOO|TORCH|PYTORCH|KMP|GOMP|FI|SPEECHDP)_\w+|(OMPI|PRTE|PMIX)_MCA_\w+"
)
#: Never recorded: secrets, and values that a launcher generates for every job.
_HIDDEN = re.compile(
    r"SECRET|TOKEN|PASSW|CREDENTIAL|(^|_)KEY|APIKEY|TRANSPORTS|_URI|_MCA_(orte|ess|prte|pmix|plm_base|ras_base)_"
    r"|INITIAL_WDIR|SPEECHDP_(HOSTFILE|HOSTS|LAUNCH|RESTART_REASON|START)$",
    re.IGNORECASE,
)


def origin_facts(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the hosts, commands and settings that a run was started with; None for what is unknown.

    Args:
        environment: environment of this process.
    """
    return {
        "directory": str(Path.cwd()),
        "git": None,  # unless the session knows it: git must not be run in a process with MPI
        "hostfile": _hostfile(environment),
        "launch": _launch_command(environment),
        "scheduler": _scheduler(environment),
        "environment": settings(environment),
    }


def start_facts(session: Session, step: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return a line of starts.jsonl.

    Args:
        session: session of the ranks that start.
        step: step they resume from; 0: the beginning.
        environment: environment of this process.
    """
    return {
        "step": step,
        "size": session.comm.size,
        "hosts": session.facts.get("hosts"),
        "scheduler": _scheduler(environment),
        "reason": environment.get(RESTART_REASON) or None,
    }


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that affect how a run computes and exchanges; never secrets."""
    names = sorted(n for n in environment if _SETTINGS.fullmatch(n) and not _HIDDEN.search(n))
    return {name: environment[name] for name in names}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return `commit` and whether files differ from it (`dirty`); None if `folder` is in no checkout."""
    if shutil.which("git") is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # installed inside the checkout of something else
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", str(folder))
    return {"commit": commit.strip(), "dirty": None if changes is None else changes.strip() != ""}


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output; None if git fails or takes long.  No program of the checkout is run."""
    # The checkout's own configuration may name programs for hooks and for watching files.
    safe = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-optional-locks")
    try:
        ended = subprocess.run(
            ["git", *safe, "-C", str(folder), *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout if ended.returncode == 0 else None


def _hostfile(environment: Mapping[str, str]) -> dict[str, Any] | None:
    source, hosts = environment.get(HOSTFILE), environment.get(HOSTS)
    if not source and not hosts:
        return None
    lines = None
    try:
        with Path(source or "").open(encoding="utf-8", errors="replace") as file:
            lines = file.read(_MOST_BYTES).splitlines()
    except (OSError, ValueError):
        pass  # the name of an allocation's variable, or a file that only the launching host has
    return {"source": source, "lines": lines, "hosts": hosts}


def _launch_command(environment: Mapping[str, str]) -> list[str] | None:
    try:
        words = json.loads(environment.get(LAUNCH, "null"))
    except ValueError:
        return None
    return [str(word) for word in words] if isinstance(words, list) else None


def _scheduler(environment: Mapping[str, str]) -> dict[str, str] | None:
    job = find_batch_job(environment)
    return None if job is None else {"name": job.scheduler, "job_id": job.job_id}
