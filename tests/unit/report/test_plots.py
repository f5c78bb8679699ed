"""Plots, apart from what they show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_home_without_room_for_matplotlib_s_cache_is_not_complained_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = subprocess.run(
        [sys.executable, "-c", "import speechdp.report.kit.svg"],
        env={**os.environ, "MPLCONFIGDIR": str(tmp_path / "file" / "folder")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == ""
