"""The service of the package of pictures for the core: pictures, and the output in notebooks."""

from __future__ import annotations

from ..extensions import Pictures
from .draw import draw, page

SERVICE = Pictures(draw, page)
