"""What an environment that is there already keeps, and what would be replaced in it, for launch/setup.

usage: existing_packages.py keep SETUP_PY NAMES...  constraints: those of these packages that are there
       existing_packages.py replaced REPORT         what `pip install --dry-run --report` would replace
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pip._vendor.packaging.specifiers import SpecifierSet


def installed(name: str) -> str | None:
    """Return the version of a package, or None where it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def keep(setup_py: Path, names: list[str]) -> list[str]:
    """Return a constraint for each of these packages that is there.

    Raises:
        SystemExit: torch is out of the bounds of setup.py; one line says so.
    """
    bounds = re.search(r'"torch([<>=!~,0-9.]+)"', setup_py.read_text())
    assert bounds is not None
    torch = installed("torch")
    if torch is not None and not SpecifierSet(bounds[1]).contains(torch, prereleases=True):
        sys.exit(
            f"setup: torch {torch} of {sys.prefix} is kept, but speechdp needs torch{bounds[1]}; "
            "install such a torch there, or make .venv without --into and --on-top-of"
        )
    return [f"{name}=={found}" for name in names if (found := installed(name)) is not None]


def replaced(report: Path) -> str:
    """Return e.g. `numpy 1.26.4 by 2.4.6, h5py 3.9.0 by 3.16.0`; empty where nothing is replaced."""
    wanted = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    changes = [(item["name"], installed(item["name"]), item["version"]) for item in wanted]
    others = [change for change in changes if change[0] != "speechdp"]
    return ", ".join(f"{name} {old} by {new}" for name, old, new in others if old not in (None, new))


def main() -> int:
    task, path = sys.argv[1], Path(sys.argv[2])
    if task == "keep":
        print(*keep(path, sys.argv[3:]), sep="\n")
    else:
        print(replaced(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
