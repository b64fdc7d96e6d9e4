"""The service of the package of eager DTensors for the core."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ..extensions import Eager
from . import collectives, dtensor
from .constructors import constructors_simulated, constructors_unread


def _world(has_values: bool) -> AbstractContextManager[None]:
    return constructors_simulated() if has_values else constructors_unread()


def _collective(func: Any, args: Any, kwargs: Any) -> Any:
    run = collectives.run if func.namespace == "c10d" else collectives.functional
    return run(func, *args, **kwargs)


SERVICE = Eager(_world, _collective, dtensor.op, dtensor.method)
