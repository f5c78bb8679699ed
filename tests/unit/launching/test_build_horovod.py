"""launch/build_horovod around its recipe, which is a stand-in here: the cache it keeps wheels in."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


def build(
    folder: Path, recipe: str, cache: Path, *words: str, pip: str = "exit 0", before_key: str = ":"
) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script in `folder`; its Python knows but the wheel's name and where Python.h is."""
    programs = {
        "launch/horovod_recipe": f"#!/bin/sh\n{recipe}\n",
        ".venv/bin/python": "#!/bin/sh\n"
        f'case "$*" in "- "*) cat >/dev/null; {before_key}; echo key ;;\n'
        f'"-m pip "*) {pip} ;; *) echo {folder} ;; esac\n',
    }
    for name, text in programs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(stat.S_IRWXU)
    (folder / "Python.h").touch()
    for name in ("build_horovod", "common.sh"):
        shutil.copy(REPOSITORY / "launch" / name, folder / "launch" / name)
    path = f"{folder}/bin:{os.environ['PATH']}"
    environ = {"PATH": path, "SPEECHDP_CACHE": str(cache), "CXX": "sh"}
    return subprocess.run(
        ["bash", "launch/build_horovod", *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        start_new_session=True,
    )


def test_a_wheel_is_built_once(tmp_path: Path) -> None:
    cache, recipe = tmp_path / "cache", 'mkdir "$2/out" && touch "$2/out/horovod-1.whl"'
    for again in (False, True):
        done = build(tmp_path, "exit 1" if again else recipe, cache)
        assert (done.returncode, done.stdout) == (0, f"{cache}/wheels/key/horovod-1.whl\n"), done.stderr
        assert ("from the cache" in done.stderr) == again


def test_of_two_builds_at_once_the_first_wheel_stays(tmp_path: Path) -> None:
    """Removed for the second one's, it would be missed by the pip that installs it."""
    cache = tmp_path / "cache"
    first = cache / "wheels" / "key" / "horovod-1.whl"
    recipe = f'mkdir "$2/out" {first.parent} && echo second >"$2/out/horovod-1.whl" && echo first >{first}'
    done = build(tmp_path, recipe, cache)
    assert (done.returncode, done.stdout) == (0, f"{first}\n"), done.stderr
    assert first.read_text() == "first\n"
    assert sorted(path.name for path in cache.rglob("*") if path.parent.name != "cache") == [
        "horovod-1.whl",
        "key",
        "key.log",
    ]


def test_a_wheel_that_pip_does_not_install_is_told_by_why(tmp_path: Path) -> None:
    recipe = 'mkdir "$2/out" && touch "$2/out/horovod-1.whl"'
    log = tmp_path / ".venv" / "pip.log"
    log.parent.mkdir()
    log.write_text("ERROR: of an earlier call\n")
    pip = "echo ERROR: ResolutionImpossible; exit 1"
    done = build(tmp_path, recipe, tmp_path / "cache", "--install", pip=pip)
    told = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and f"(ERROR: ResolutionImpossible; log: {log}); no versions for" in told, (
        told
    )
    assert told.endswith("; then run launch/build_horovod --install")
    assert "\n---- pip install --force-reinstall --no-deps " in log.read_text()
    done = build(tmp_path, recipe, tmp_path / "cache", "--install", pip="kill -INT $PPID; exit 1")
    assert done.returncode == 130
    assert "interrupted, Horovod is not installed; to install it: launch/" in done.stderr.splitlines()[-1]


def test_what_killed_builds_have_left_is_removed_after_a_day(tmp_path: Path) -> None:
    wheels = tmp_path / "cache" / "wheels"
    for name, age_s in (("building.old", 100_000), ("building.new", 100)):
        (wheels / name / "source").mkdir(parents=True)
        os.utime(wheels / name, (time.time() - age_s,) * 2)
    build(tmp_path, "exit 1", tmp_path / "cache")
    assert [path.name for path in wheels.iterdir()] == ["building.new"]


def test_a_build_ends_with_the_setup_that_it_is_for(tmp_path: Path) -> None:
    # As the leader of a process group, half a minute is over in no time, and that setup is gone.
    gone = subprocess.Popen(["true"])
    gone.wait()
    sleep = tmp_path / "bin" / "sleep"
    sleep.parent.mkdir()
    sleep.write_text("#!/bin/sh\nexec /bin/sleep 0.1\n")
    sleep.chmod(stat.S_IRWXU)
    recipe = "exec /bin/sleep 300"
    done = build(tmp_path, recipe, tmp_path / "cache", "--beside", str(gone.pid))
    assert done.returncode == 130, done.stderr
    assert "interrupted" not in done.stderr and "Terminated" not in done.stderr  # setup itself says so
    assert not list((tmp_path / "cache" / "wheels").iterdir())


@pytest.mark.parametrize(("number", "words"), [("INT", []), ("TERM", ["--beside", str(os.getpid())])])
def test_a_build_that_is_interrupted_before_it_compiles_compiles_nothing(
    tmp_path: Path, number: str, words: list[str]
) -> None:
    """It went on for the minutes that this takes, and what waited for its end with it."""
    kill = f"read -r _ _ _ _ _ session _ </proc/$$/stat; kill -{number} $session"
    done = build(tmp_path, "touch begun", tmp_path / "cache", *words, before_key=kill)
    assert done.returncode == 130, done.stderr
    assert not (tmp_path / "begun").exists()
    assert ("interrupted, Horovod (cpu) is not built; " in done.stderr) == (not words)


def test_ctrl_c_while_the_name_of_the_wheel_is_found_out_is_an_interruption(tmp_path: Path) -> None:
    """It was told as a missing torch, or the wheel was installed all the same."""
    kill, cache = "read -r _ _ _ _ _ session _ </proc/$$/stat; kill -INT $session", tmp_path / "cache"
    done = build(tmp_path, "touch begun", cache, "--install", before_key=f"{kill}; exit 1")
    assert (done.returncode, done.stderr) == (
        130,
        "build_horovod: interrupted, Horovod (cpu) is not built; to build it later: "
        "launch/build_horovod --install\n",
    )
    (cache / "wheels" / "key").mkdir(parents=True)
    (cache / "wheels" / "key" / "horovod-1.whl").touch()
    done = build(tmp_path, "touch begun", cache, "--install", pip="touch begun", before_key=kill)
    assert done.returncode == 130, done.stderr
    assert "interrupted, Horovod is not installed; to install it: launch/" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "begun").exists()


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
