"""launch/setup and launch/quickstart, copied beside stand-ins of what they call: nothing is installed."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPTS = ("setup", "quickstart", "common.sh", "chosen_environment.sh", "build_horovod")


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(stat.S_IRWXU)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with the scripts of launch/ and setup.py."""
    (tmp_path / "launch").mkdir()
    for name in ("setup.py", *(f"launch/{name}" for name in SCRIPTS)):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def run_script(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *words],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "SPEECHDP_CACHE": str(folder / "cache"), **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(("python", "serves"), [("exit 0", True), ("exit 1", False), (None, False)])
def test_an_environment_whose_python_is_gone_is_made_anew(
    checkout: Path, python: str | None, serves: bool
) -> None:
    stamp = (
        ". launch/common.sh; cd launch; "
        'echo "$(cat ../setup.py setup chosen_environment.sh common.sh build_horovod | cksum) '
        '$ROOT $TORCH_SPEC horovod=yes dev=no" >../.venv/speechdp-setup.stamp'
    )
    if python is None:
        (checkout / ".venv/bin").mkdir(parents=True)
        (checkout / ".venv/bin/python").symlink_to(checkout / "gone")
    else:
        write_program(checkout / ".venv/bin/python", python)
    run_script(checkout, "-c", stamp).check_returncode()
    write_program(checkout / "python", 'case "$*" in *--clear*) echo is made anew >&2; exit 1 ;; esac')
    done = run_script(checkout, "launch/setup", PYTHON=str(checkout / "python"))
    assert ("setup: .venv is up to date" in done.stdout) == serves, done.stdout + done.stderr
    assert ("is made anew" in done.stderr) == (not serves)
    assert done.returncode == (0 if serves else 1)


#: Prepares and begins a sweep, unless it is given an option that it refuses.
SPEECHDP = """
echo "$@" >>calls
case "$*" in
    *mistaken*) exit 1 ;;
    *" prepare "*) mkdir -p quickstart-words/data && touch quickstart-words/data/data.json ;;
    *" launch "*) mkdir -p quickstart-words/sweep && echo '{}' >quickstart-words/sweep/sweep.json; exit 3 ;;
    -c*) exit 1 ;;
esac
"""


def test_quickstart_takes_a_manifest(checkout: Path) -> None:
    write_program(checkout / "launch/setup", "exit 0")
    write_program(checkout / ".venv/bin/python", SPEECHDP)
    (checkout / "words.csv").write_text("audio,text\n")
    run_script(checkout, "launch/quickstart", "--corpus", "words.csv", "--out", "out")
    assert (checkout / "out" / "corpus").read_text().strip() == str((checkout / "words.csv").resolve())
    refused = run_script(checkout, "launch/quickstart", "--corpus", "word.csv")
    assert refused.returncode == 1 and "word.csv: no such folder or file; give" in refused.stderr


def test_quickstart_takes_the_mended_command_after_one_that_failed(checkout: Path) -> None:
    (checkout / "words").mkdir()
    write_program(checkout / "launch/setup", "exit 0")
    write_program(checkout / ".venv/bin/python", SPEECHDP)
    command = ("launch/quickstart", "--corpus", "words")

    def start(*more: str) -> subprocess.CompletedProcess[str]:
        return run_script(checkout, *command, *more)

    assert start("--pattern", "mistaken").returncode == 1  # nothing is prepared
    assert start("--", "--mistaken").returncode == 1  # it is, and the sweep is refused
    assert (checkout / "quickstart-words/data/data.json").exists()
    # Prepared data have their options, the sweep that has not begun has none.
    refused = start("--pattern", "{word}")
    assert refused.returncode == 1
    assert "quickstart: " in refused.stderr and "was prepared with other options" in refused.stderr
    assert start().returncode == 3
    assert start("--", "--seed", "2").returncode == 1
    other = start("--ranks", "3", "--", "--epochs", "2", "--seed=5").stderr
    differs = "--ranks was 2, is 3; --epochs was 8, is 2; --seed was not given, is 5"
    assert f"was begun with other options ({differs}); repeat its command" in other
    assert start().returncode == 3


def test_quickstart_writes_other_options_to_another_folder(checkout: Path) -> None:
    (checkout / "words").mkdir()
    write_program(checkout / "launch/setup", "exit 0")
    write_program(checkout / ".venv/bin/python", SPEECHDP)
    command = ("launch/quickstart", "--corpus", "words")
    assert run_script(checkout, *command).returncode == 3
    refused = run_script(checkout, *command, "--ranks", "3")
    assert "give another by --out" in refused.stderr
    assert run_script(checkout, *command, "--out", "three", "--ranks", "3").returncode == 3
    assert f"sweep {checkout}/three/data {checkout}/three/sweep" in (checkout / "calls").read_text()
    assert run_script(checkout, *command, "--out", "three", "--ranks", "3").returncode == 3
    assert "holds other things" in run_script(checkout, *command, "--out", "launch").stderr


def test_quickstart_says_which_folder_cannot_be_written_to(checkout: Path) -> None:
    (checkout / "file").touch()
    refused = run_script(checkout, "launch/quickstart", "--out", "file/out")
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"quickstart: {checkout}/file/out cannot be written to; give")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("has_venv", [False, True])
def test_setup_says_that_the_checkout_cannot_be_written_to(checkout: Path, has_venv: bool) -> None:
    if has_venv:
        (checkout / ".venv").mkdir()
    read_only = f"mount --bind {checkout} {checkout} && mount -o remount,ro,bind {checkout}"
    apart = ("-c", 'exec unshare --mount --map-root-user sh -c "$0"')
    if run_script(checkout, *apart, read_only).returncode != 0:
        pytest.skip("this user may mount nothing, not even in a namespace")
    refused = run_script(checkout, *apart, f"{read_only} && exec launch/setup")
    assert refused.returncode == 1
    folder = checkout / ".venv" if has_venv else checkout
    assert refused.stderr.startswith(f"setup: {folder} cannot be written to; run launch/setup in a copy")
    assert refused.stderr.count("\n") == 1


def test_quickstart_passes_on_what_prepare_advises(checkout: Path) -> None:
    (checkout / "words").mkdir()
    (checkout / "lexicon.txt").write_text("one w a n\n")
    write_program(checkout / "launch/setup", "exit 0")
    write_program(checkout / ".venv/bin/python", SPEECHDP)
    advised = (
        "--unknown-words skip --split speaker:test=ann --path-map old=/new --skip-incomplete --allow-pipes"
    )
    words = [*advised.split(), "--lexicon=lexicon.txt", "--workers", "1", "--held-out-speaker", "ann"]
    words += ["--resample", "8000", "--num-mel-bins", "23", "--g2p-model", "lexicon.txt"]
    words += ["--dev", "words", "--channel", "mix"]
    assert run_script(checkout, "launch/quickstart", "--corpus", "words", *words).returncode == 3
    prepare, sweep = ((checkout / "calls").read_text().splitlines()[number] for number in (0, 2))
    lexicon = checkout / "lexicon.txt"
    assert f" prepare {checkout}/words {checkout}/quickstart-words/data {advised}" in prepare
    assert f" --lexicon {lexicon} --workers 1 --held-out-speaker ann" in prepare
    assert f" --resample 8000 --num-mel-bins 23 --g2p-model {lexicon}" in prepare
    assert f" --dev {checkout}/words --channel mix" in prepare
    assert "--unknown-words" not in sweep
    assert prepare.endswith(" --advise=no") and " --flat-start " in sweep
    lacking = run_script(checkout, "launch/quickstart", "--corpus", "words", "--unknown-words")
    assert "--unknown-words needs a value" in lacking.stderr


#: What a recipe that is left by Ctrl-C does: the signal reaches all of the terminal's processes.
INTERRUPTED = "kill -INT $PPID; exit 1"
BUILT = 'mkdir -p "$2/out" && touch "$2/out/horovod-1.whl"'


@pytest.mark.parametrize(
    ("made", "ended", "code"),
    [
        (BUILT, r"Horovod \(cpu\) is built \(\d+ min ", 0),
        ("exit 1", r"Horovod \(cpu\) could not be built \(\d+ min ", 1),
        (INTERRUPTED, r"interrupted, Horovod \(cpu\) is not built; to build it later: launch/build_", 130),
    ],
)
def test_the_build_of_horovod_shows_life_and_its_end(
    checkout: Path, made: str, ended: str, code: int
) -> None:
    # Half a minute is over in no time, and the build waits for a line that says so.
    write_program(checkout / "bin/sleep", "exec /bin/sleep 0.1")
    write_program(checkout / "bin/c++", "exit 0")
    # Where there is a GPU, too, the build is the one for CPUs.
    write_program(checkout / "bin/nvidia-smi", "exit 1")
    write_program(
        checkout / ".venv/bin/python", f'case "$*" in -c*) echo {checkout} ;; "- "*) echo key ;; esac'
    )
    (checkout / "Python.h").touch()
    wait = f"until grep -q compiled, {checkout}/said; do /bin/sleep 0.05; done"
    write_program(checkout / "launch/horovod_recipe", f"{wait}\n{made}")
    path = f"{checkout}/bin:{os.environ['PATH']}"
    run_script(checkout, "-c", "launch/build_horovod --install 2>said; echo $? >code", PATH=path)
    said = (checkout / "said").read_text()
    life = r"build_horovod: Horovod \(cpu\) is being compiled, \d+ min \d+ s so far, log: "
    assert re.search(life, said), said
    assert re.search(f"build_horovod: {ended}", said.splitlines()[-1]), said
    assert (checkout / "code").read_text() == f"{code}\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "quickstart: Horovod is installed; all is done"),
        (
            1,
            "Horovod could not be built; the mpi back-end will be used. To try again: launch/build_horovod",
        ),
        (
            130,
            "quickstart: Horovod is left out, the mpi back-end is used; to build it: launch/build_horovod",
        ),
    ],
)
def test_quickstart_says_what_became_of_horovod(checkout: Path, code: int, said: str) -> None:
    (checkout / "words").mkdir()
    write_program(checkout / "launch/setup", "exit 0")
    write_program(checkout / "launch/build_horovod", f"exit {code}")
    program = SPEECHDP.replace("; exit 3", "").replace("-c*) exit 1", "*find_spec*) exit 1")
    write_program(checkout / ".venv/bin/python", program)
    done = run_script(checkout, "launch/quickstart", "--corpus", "words")
    assert done.stdout.splitlines()[-1].startswith(said), done.stderr
    assert "speechdp tune finds the one that reaches a value soonest, which can be another" in done.stdout
