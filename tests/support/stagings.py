"""How many programs this process has captured, partitioned and compiled; how it forgets them."""

from __future__ import annotations

from shardfn.runtime import cache

counts = cache.counts
forget = cache.clear
