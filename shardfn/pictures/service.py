"""The service of the room of pictures for the core: pictures, and what a notebook shows."""

from __future__ import annotations

from ..extensions import Pictures
from .draw import draw, page

SERVICE = Pictures(draw, page)
