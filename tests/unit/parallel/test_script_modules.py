"""Which modules are a script's own: it is another version of itself where one of them was changed."""

from __future__ import annotations

import pathlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from speechdp.parallel import script_folder


def test_modules_of_python_itself_are_not_a_scripts_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a script in a home folder that Python is installed below."""
    home = Path(pathlib.__file__).resolve().parents[2]
    own = home / "digits.py"
    monkeypatch.setitem(sys.modules, "digits", SimpleNamespace(__file__=str(own)))
    found = script_folder._own_modules(home / "train.py")
    assert own in found and Path(pathlib.__file__).resolve() not in found
    assert not any(path.is_relative_to(Path(pathlib.__file__).resolve().parent) for path in found)


def test_packages_that_provide_strategies_are_not_a_scripts_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Installed as a link to their source beside the script, they are imported in some runs only."""
    about = tmp_path / "site" / "lazy-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lazy\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[speechdp.strategies]\nlazy = lazy_package.averaging:Lazy\n")
    monkeypatch.syspath_prepend(str(about.parent))
    files = {name: tmp_path / f"{name}.py" for name in ("lazy_package", "lazy_package.averaging", "digits")}
    for name, file in files.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__file__=str(file)))
    assert script_folder._own_modules(tmp_path / "train.py") == [files["digits"].resolve()]
