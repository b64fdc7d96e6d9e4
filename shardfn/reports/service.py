"""The service of the package of reports for the core: the page of a lowered program."""

from __future__ import annotations

from ..extensions import Reports
from .report import report_of

SERVICE = Reports(report_of)
