"""Schedules of pipelines as values: for each coordinate of a mesh axis, in order, what it
computes.
"""

from . import schedules
from .actions import Action
from .schedule import Schedule

__all__ = ["Action", "Schedule", "schedules"]
