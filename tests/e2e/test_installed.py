"""speechdp as somebody has it who has installed its wheel, without Horovod and without launch/setup."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs import DEADLINE_S
from tests.helpers.mpi import BIN, REPOSITORY, job_environment
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data

#: What of the checkout a wheel is made of.
_SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("build") is None, reason="build is not installed (launch/setup --dev)"
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Build the wheel and install it, into a folder from which it hides the checkout; hide Horovod."""
    folder = tmp_path_factory.mktemp("installed")
    source, site, hidden = folder / "source", folder / "site", folder / "hidden" / "horovod"
    shutil.copytree(
        REPOSITORY / "speechdp", source / "speechdp", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in _SOURCES:
        shutil.copy(REPOSITORY / name, source)
    _run(folder, os.environ, "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source))
    (wheel,) = folder.glob("speechdp-*.whl")
    _run(folder, os.environ, "pip", "install", "--no-deps", "--quiet", "--target", str(site), str(wheel))
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('no horovod here', name='horovod')\n")
    return {**job_environment(), "PYTHONPATH": f"{site}{os.pathsep}{hidden.parent}"}


def _run(folder: Path, environment: os._Environ[str] | dict[str, str], *command: str) -> str:
    """Run a module of this Python in a folder that is not the checkout; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_wheel_trains_over_mpi_and_reports(environment: dict[str, str], tmp_path: Path) -> None:
    site = environment["PYTHONPATH"].split(os.pathsep)[0]
    program = "import speechdp, sys; sys.exit(not speechdp.__file__.startswith(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, site], cwd=tmp_path, env=environment, check=True)
    data, run = tmp_path / "data", tmp_path / "run"
    write_tiny_data(data, TinySizes(train=8, dev=2, test=2))
    assert BIN.is_dir()  # mpirun stands beside this Python, where launch finds it
    options = (*TINY_MODEL, "--batch-size", "2", "--epochs", "1")
    printed = _run(
        tmp_path, environment, "speechdp", "launch", "-np", "2", "--", "train", str(data), str(run), *options
    )
    assert "back-end mpi instead of horovod" in printed and (run / "completed.json").is_file()
    _run(tmp_path, environment, "speechdp", "report", str(run))
    assert (run / "report" / "report.html").is_file()
