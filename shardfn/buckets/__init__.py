"""The bucket plan, which lists the gradients that share a collective. A bucket plan can be printed,
hashed, saved and edited.
"""

from __future__ import annotations

from ..byte_sizes import bytes_of, check_caps, human_bytes
from .plan import BucketPlan, table
from .records import Bucket, BucketOptions, Row, Unbucketed

__all__ = [
    "Bucket",
    "BucketPlan",
    "Row",
    "Unbucketed",
    "BucketOptions",
    "bytes_of",
    "check_caps",
    "human_bytes",
    "table",
]
