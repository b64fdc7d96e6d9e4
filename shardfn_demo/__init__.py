"""The demonstration, `python -m shardfn demo`: one training run in three worlds, and the same
numbers in each.
"""

from shardfn_demo.report import main

__all__ = ["main"]
