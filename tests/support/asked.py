"""Which cases of a module run: what is computed once for all of them need not hold the others."""

from __future__ import annotations

from typing import Any

import pytest


def asked(request: pytest.FixtureRequest, *params: str) -> set[Any]:
    """The values of parameters in the cases of this module that are to run.

    Args:
        request: of a fixture of the module.
        params: names; the values of several are tuples.
    """
    found = set()
    for item in request.session.items:
        case = getattr(item, "callspec", None)
        is_here = item.path == request.path
        if is_here and case and set(params) <= case.params.keys():
            values = [case.params[name] for name in params]
            found.add(tuple(values) if len(values) > 1 else values[0])
    return found
