"""Strided shards: an axis that shards an inner factor of a dim, and axes on one dim in any
order.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from message import without_line
from programs import Drawn, programs
from test_random_programs import checked
from torch.distributed.tensor import Shard

import shardfn as sf
from shardfn import P
