"""What a Python that has just started does not hand to the fork server: it is no program of ours."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.startup.handing_over import hand_over


@pytest.mark.parametrize("arguments", [[], ["-m"], ["-m", "json.tool"], ["-c", "pass"]])
def test_what_is_no_program_runs_here(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", *arguments])
    hand_over("/no/socket")
