"""Parse JSON of unknown origin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    Raises:
        ValueError: not JSON, or nested so deeply that Python's parser gives up.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def other_version(content: Mapping[str, Any], known: int) -> str:
    """Return what is to be said of a record that may be misread; "": it is of the known version, or of none.

    It is not damaged: whatever stands beside it is of use to the speechdp that wrote it.

    Example:
        >>> other_version({"format": "speechdp-run", "version": 2}, 1).partition(";")[0]
        'is of version 2, and this speechdp reads version 1'
    """
    version = content.get("version", known)
    if version == known:
        return ""
    return (
        f"is of version {version!r}, and this speechdp reads version {known}; use the speechdp that wrote "
        "it, or choose another folder"
    )
