"""How `--help` shows an option whose type and Python default do not explain it."""

from __future__ import annotations

from typing import Any

import tyro

#: Default of --hostfile in `--help`: where hosts come from if no file is given.
BATCH_JOB_OR_HERE = "the hosts of the batch job this runs in, else this machine"


#: Annotation of an option that may be given as "", as its help explains. Any other option refuses an empty
#: value, unless its default is "".
MAY_BE_EMPTY = "may be empty"


def shown(metavar: str, default: str | None = None) -> Any:
    """Return the annotation of an option: `Annotated[int | None, shown("N", "one per core")] = None`.

    Args:
        metavar: placeholder of the value, e.g. "FRAMES" or "{fast,loop}".
        default: the default that takes effect if the Python one is None or empty; None: the Python one.
    """
    return tyro.conf.arg(
        metavar=metavar, help_behavior_hint=None if default is None else f"(default: {default})"
    )


def heading(title: str) -> Any:
    """Return the annotation of a group of options, which `--help` shows under "TITLE options"."""
    return tyro.conf.arg(name=title, prefix_name=False)
