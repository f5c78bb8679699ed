"""Parse JSON of unknown origin."""

from __future__ import annotations

import json
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
