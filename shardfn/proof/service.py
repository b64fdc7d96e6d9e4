"""The service of the room of proofs for the core: digests of values."""

from __future__ import annotations

from ..extensions import Digests
from .comparisons.digests import runner, watch

SERVICE = Digests(runner, watch)
