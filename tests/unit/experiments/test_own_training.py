"""How a comparison decodes what it has trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechdp.experiments.arguments import split_to_tune_on


@pytest.mark.parametrize("name", ["lm.arpa.gz", "G.fst"])
def test_scales_are_chosen_where_there_is_a_language_model(tmp_path: Path, name: str) -> None:
    assert split_to_tune_on(tmp_path, "dev", "test") is None
    (tmp_path / name).touch()
    assert split_to_tune_on(tmp_path, "dev", "test") == "dev"
    assert split_to_tune_on(tmp_path, "dev", "dev") == "dev"  # each run at its best there
    assert split_to_tune_on(tmp_path, "dev", "") is None
