"""Parse JSON of unknown origin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the content of a JSON text.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply for Python's parser.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def other_version(content: Mapping[str, Any], known: int) -> str:
    """Return the message about a record of another version; "": it has the known version, or none.

    Such a record is not damaged: it and the files beside it are of use to the speechdp that wrote them.

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
