"""A training that has made its model worse again says so at its end, and in its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speechdp.parallel.run_files import RunDirectory
from speechdp.tasks.metrics import L1_ERROR, LOG_PROB, Metric
from speechdp.train.run import _past_best


def write_curve(folder: Path, metric: Metric, *values: float | None) -> RunDirectory:
    lines = [json.dumps({"epoch": i, metric.recorded_as: x}) for i, x in enumerate(values, start=1)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"epoch": 9, "hel']) + "\n", encoding="utf-8")
    return RunDirectory(folder)


def test_the_end_of_training_tells_of_a_better_model_before(tmp_path: Path) -> None:
    run = write_curve(tmp_path, LOG_PROB, -4.1, -3.655, None, -4.616)
    assert _past_best(run, LOG_PROB) == (
        f"{tmp_path}: past its best: held-out log-probability -3.655 nats/frame after epoch 2, -4.616 "
        "nats/frame at the end; train for fewer epochs, on more data, or with more regularisation (such as "
        "dropout)"
    )
    run = write_curve(tmp_path, L1_ERROR, 0.2, 0.1, 0.15)
    assert "L1 error L1 0.1000 per frame after epoch 2, L1 0.1500 per frame at the end" in _past_best(
        run, L1_ERROR
    )


@pytest.mark.parametrize("values", [(), (None,), (-4.0,), (-4.0, -3.0), (-0.5, -0.519), (-5.0, -5.04)])
def test_a_model_about_as_good_as_ever_is_not_spoken_of(
    tmp_path: Path, values: tuple[float | None, ...]
) -> None:
    assert _past_best(write_curve(tmp_path, LOG_PROB, *values), LOG_PROB) == ""
    assert _past_best(RunDirectory(tmp_path / "none"), LOG_PROB) == ""
