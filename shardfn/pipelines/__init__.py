"""Pipeline schedules, which list, for each rank of the pipeline axis, its actions in order."""

from . import schedules
from .actions import Action
from .proof import Checked
from .schedule import Schedule

__all__ = ["Action", "Checked", "Schedule", "schedules"]
