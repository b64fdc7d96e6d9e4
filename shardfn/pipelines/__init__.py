"""Schedules of pipelines as values: for each coordinate of a mesh axis, in order, what it
computes.
"""

from . import schedules
from .actions import Action
from .proof import Checked
from .schedule import Schedule

__all__ = ["Action", "Checked", "Schedule", "schedules"]
