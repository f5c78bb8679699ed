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
