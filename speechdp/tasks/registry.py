"""Find tasks by name, and make them from `NAME:option=value,...`.

Others register a class with `task`, offer it through the entry-point group `speechdp.tasks`, or name it as
MODULE:CLASS.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from speechdp.errors import ConfigError
from speechdp.extensions import ExtensionPoint, code_of, read_options
from speechdp.tasks.base import Task
from speechdp.tasks.metrics import Metric, is_reserved

if TYPE_CHECKING:  # --help and the launcher do without torch
    from torch import nn

_Class = TypeVar("_Class", bound=type[Task])
#: Our tasks, by name: imported only when used, because importing their models takes time.
_OURS = {
    "acoustic": ("speechdp.tasks.acoustic", "AcousticTask"),
    "synthesis": ("speechdp.tasks.synthesis", "SynthesisTask"),
}


def _check_declared(where: str, cls: type[Task]) -> None:
    """Refuse a class whose metrics or `trains_on` cannot be used.  Raises ConfigError."""
    metrics = getattr(cls, "metrics", ())
    if not metrics:
        raise ConfigError(f"{where}: {cls.__name__} has no metrics")
    if not (isinstance(metrics, tuple) and all(isinstance(metric, Metric) for metric in metrics)):
        raise ConfigError(f"{where}: metrics of {cls.__name__} is a tuple; write metrics = (Metric(...),)")
    if "spectrograms" in cls.trains_on and not cls.whole_utterances:
        raise ConfigError(f"{where}: texts belong to whole utterances; declare whole_utterances = True")
    keys = [metric.key for metric in metrics]
    if len(set(keys)) < len(keys) or not all(key.isidentifier() for key in keys):
        raise ConfigError(
            f"{where}: the keys of metrics are different words, not {', '.join(map(repr, keys))}"
        )
    for key in keys:
        if is_reserved(key):
            raise ConfigError(
                f"{where}: a metric's key {key!r} has a meaning in reports; choose another word"
            )


#: All tasks; other packages add theirs through this entry-point group.
TASKS = ExtensionPoint[Task]("task", "speechdp.tasks", Task, _OURS.keys, _check_declared)


def task(name: str) -> Callable[[_Class], _Class]:
    """Return a decorator that registers a task class under the given name.

    Args:
        name: letters, digits and underscores, for `--task`.

    Raises:
        ConfigError: the class is not a task, a field cannot be an option, or the name is invalid or taken.

    Example::

        @speechdp.task("speaker")
        @dataclasses.dataclass(frozen=True)
        class SpeakerTask(Task):
            width: int = 64
            ...
    """

    return TASKS.decorator(name)


def own_task_with(model_option: str) -> str:
    """Return the first of our tasks whose model has this option of `--help`'s group "model"."""
    return next(name for name in _OURS if model_option in task_class(name).model_options)


def is_ours(text: str) -> bool:
    """Return whether `NAME` or `MODULE:CLASS`, with or without options, is one of our tasks."""
    return text.partition(":")[0] in _OURS


def task_class(text: str) -> type[Task]:
    """Return the class of `NAME` or `MODULE:CLASS`, with or without options.

    Raises:
        ConfigError: there is no such class, or its module cannot be used.
    """
    return _find(text)[0]


#: Why a model file may have options that its class does not take, and what to do.
_RECORDED = (
    "the file is from another version of the class, or was edited by hand; give the class of its training, "
    "or copy the file again"
)


def _made_as_recorded(cls: type[Task], options: str) -> Task:
    """Return a user's task with the options in a model file.  Raises ConfigError."""
    try:
        values = read_options(cls.name, cls, options, kind="task")
    except ConfigError as error:
        raise ConfigError(f"{error}; {_RECORDED}") from error
    with code_of(cls, f"--task {cls.name}:{options}", _RECORDED):
        return cls(**values)


def task_options(text: str) -> dict[str, Any]:
    """Return the options that follow a task's name.

    Raises:
        ConfigError: as `task_class`; an unknown option, or a value that does not fit.
    """
    cls, rest = _find(text)
    if cls.presets and rest:
        remedy = f"write --task {cls.name}, and its options as --preset and so on"
        if cls.name not in _OURS:
            remedy += f"; for options of its own {cls.__name__} declares presets = () and model_options = ()"
        raise ConfigError(f"--task {text}: {remedy}")
    return read_options(cls.name, cls, rest, kind="task")


def networks_of(given: str | None) -> Callable[[str, str], Callable[[int, int], nn.Module] | None]:
    """Return a function from the task name and options in a model file to what makes the file's network.

    For `own` of `load_model`.  The function returns None if the file is of another task.

    Args:
        given: the task as in `--task`, either with the options that the network was made with or without
            options; None: no task.

    Raises:
        ConfigError: there is no such task.  The returned function raises it if a file has other options.
    """
    if given is None:
        return lambda name, options: None
    cls, options_given = task_class(given), task_options(given)

    def network_of(name: str, options: str) -> Callable[[int, int], nn.Module] | None:
        if name != cls.name or not hasattr(cls, "make_network"):
            return None
        made = _made_as_recorded(cls, options)
        for option, value in options_given.items():
            if getattr(made, option) != value:
                raise ConfigError(
                    f"the network was made with {option}={getattr(made, option)}, but --task gives another "
                    "value; give --task without options"
                )
        return partial(made_network, made)

    return network_of


def made_network(task: Any, feature_dim: int, num_classes: int) -> nn.Module:
    """Return the network that `make_network` of an AcousticTask makes.

    Raises:
        ConfigError: a user's method fails, or returns something else.
    """
    from torch import nn  # noqa: PLC0415 - --help and the launcher do without

    cls = type(task)
    is_ours = cls.make_network.__module__.startswith("speechdp.")  # our errors are not the user's
    with nullcontext() if is_ours else code_of(cls, f"--task {task.name}: make_network()", "fix the class"):
        network = task.make_network(feature_dim, num_classes)
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"--task {task.name}: make_network() of {cls.__name__} must return a torch.nn.Module; it "
            f"returned an object of type {type(network).__name__}"
        )
    return network


def _find(text: str) -> tuple[type[Task], str]:
    """Return a task's class and the text of its options."""
    name, _, rest = text.partition(":")
    if name in _OURS:
        module, attribute = _OURS[name]
        found: type[Task] = getattr(importlib.import_module(module), attribute)
        return found, rest
    return TASKS.named(text)
