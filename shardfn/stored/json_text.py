"""JSON that somebody else may have written."""

from __future__ import annotations

import json
from typing import Any


def parsed(text: str | bytes) -> Any:
    """Parse untrusted JSON.

    Raises:
        ValueError: it is damaged, nested too deeply, or not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the values are nested too deeply") from None
