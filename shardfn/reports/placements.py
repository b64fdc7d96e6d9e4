"""The placements of arguments, with the bytes of a rank."""

from __future__ import annotations

from typing import Any

from ..placement_table import Placements
from .strings import Strings

MOST_ROWS = 3000


def placement_rows(table: Placements, strings: Strings) -> dict[str, Any]:
    """Return a row for the arguments of one shape and placement whose paths differ in numbers.

    Args:
        table: of the arguments of a call.
        strings: of the page.
    """
    rows = table.rows
    return {
        "total": table.total,
        "nbytes": table.nbytes,
        "rows": [
            {
                "path": strings.number(row.path),
                "count": len(row.paths),
                "shape": strings.number(row.shape),
                "dtype": strings.number(row.dtype),
                "placement": strings.number(row.placement),
                "nbytes": row.nbytes,
            }
            for row in rows[:MOST_ROWS]
        ],
        "left_out": max(0, len(rows) - MOST_ROWS),
    }
