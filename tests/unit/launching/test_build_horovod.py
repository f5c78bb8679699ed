"""launch/build_horovod around its recipe, which is a stand-in here: the cache it keeps wheels in."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def build(folder: Path, recipe: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script in `folder`; its Python knows but the wheel's name and where Python.h is."""
    programs = {
        "launch/horovod_recipe": f"#!/bin/sh\n{recipe}\n",
        ".venv/bin/python": "#!/bin/sh\n"
        f'if [ "$1" = - ]; then cat >/dev/null; echo key; else echo {folder}; fi\n',
    }
    for name, text in programs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(stat.S_IRWXU)
    (folder / "Python.h").touch()
    for name in ("build_horovod", "common.sh"):
        shutil.copy(REPOSITORY / "launch" / name, folder / "launch" / name)
    environ = {"PATH": os.environ["PATH"], "SPEECHDP_CACHE": str(cache), "CXX": "sh"}
    return subprocess.run(
        ["bash", "launch/build_horovod"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_wheel_is_built_once(tmp_path: Path) -> None:
    cache, recipe = tmp_path / "cache", 'mkdir "$2/out" && touch "$2/out/horovod-1.whl"'
    for again in (False, True):
        done = build(tmp_path, "exit 1" if again else recipe, cache)
        assert (done.returncode, done.stdout) == (0, f"{cache}/wheels/key/horovod-1.whl\n"), done.stderr
        assert ("from the cache" in done.stderr) == again


def test_a_recipe_that_fails_names_its_log(tmp_path: Path) -> None:
    done = build(tmp_path, "echo why; exit 1", tmp_path / "cache")
    assert done.returncode == 1 and f"log: {tmp_path}/cache/logs/key.log; fix the error in" in done.stderr
    assert (tmp_path / "cache" / "logs" / "key.log").read_text() == "why\n"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "file" / "cache"
    cache.parent.touch()
    done = build(tmp_path, "exit 1", cache)
    remedy = f"build_horovod: {cache} cannot be written; set SPEECHDP_CACHE to a folder you may write to"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == remedy
    assert len(done.stderr.splitlines()) == 2, done.stderr  # after what it is about to do


def test_a_wheel_of_the_folder_without_network_is_taken(tmp_path: Path) -> None:
    wheel = tmp_path / "packages" / "horovod" / "key" / "horovod-1.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "speechdp-setup.choices").write_text(f"wheels={tmp_path}/packages\n")
    done = build(tmp_path, "exit 1", tmp_path / "cache")
    assert (done.returncode, done.stdout) == (0, f"{wheel}\n"), done.stderr


def test_an_mpi_without_its_compiler_is_named(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "speechdp-setup.choices").write_text(f"mpi={tmp_path}/site\n")
    done = build(tmp_path, "exit 0", tmp_path / "cache")
    assert done.returncode == 1 and f"{tmp_path}/site/bin/mpicxx is missing" in done.stderr


def test_the_tools_of_the_build_do_not_get_into_the_environment(tmp_path: Path) -> None:
    # With --into it may have a cmake of its own.
    calls = tmp_path / "calls"
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ncase "$*" in *download*) exit 1 ;; esac\necho "$*" >>{calls}\n')
    python.chmod(stat.S_IRWXU)
    (tmp_path / "launch").mkdir()
    for name in ("horovod_recipe", "common.sh"):
        shutil.copy(REPOSITORY / "launch" / name, tmp_path / "launch" / name)
    command = ["bash", "launch/horovod_recipe", "cpu", str(tmp_path / "work")]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300, check=False)
    (tools,) = (line for line in calls.read_text().splitlines() if "cmake" in line)
    assert f"pip install --target {tmp_path}/work/tools " in tools
