"""Make the ranks of a job under test wait at gates (tests/helpers/gates.py).

Nothing else is imported for that: the trainer is changed once the program itself has imported it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_TRAINER = "speechdp.train.trainer"
_POLL_S = 0.01


class _Changing(importlib.abc.MetaPathFinder):
    """Finds the trainer's module, once, and patches it as soon as it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            _change(module.Trainer)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _change(trainer_class: Any) -> None:
    folder, _, steps = os.environ["SPEECHDP_TEST_GATES"].rpartition(":")
    gates = {int(step): Path(folder) / step for step in steps.split(",")}
    run, train = trainer_class.run, trainer_class._train

    def run_and_note(trainer: Any, loader: Any, stop: Any, *more: Any) -> None:
        trainer.request = stop._request
        run(trainer, loader, stop, *more)

    def train_and_wait(trainer: Any, step: Any) -> None:
        train(trainer, step)
        for number, opened in gates.items():
            while trainer.counters.step >= number and not opened.exists():
                if trainer.request is not None and trainer.request.received is not None:
                    break
                time.sleep(_POLL_S)

    trainer_class.run, trainer_class._train = run_and_note, train_and_wait


def put_gates_up() -> None:
    """Make the trainer wait at the gates that the environment names."""
    if "SPEECHDP_TEST_GATES" not in os.environ:
        return
    if _TRAINER in sys.modules:  # in a fork
        _change(sys.modules[_TRAINER].Trainer)
    else:
        sys.meta_path.insert(0, _Changing())
