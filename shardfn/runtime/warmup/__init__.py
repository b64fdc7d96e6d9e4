"""The option `warmup`: the first calls run op by op, while the program is compiled in the
background.
"""

from .runner import Warming
from .switch import Switch, switch_of

__all__ = ["Switch", "Warming", "switch_of"]
