"""clear_cache: forget what was captured and compiled, here or on disk."""

from __future__ import annotations

from .. import _compat
from ..accepted import accept
from ..runtime import cache
from ..stored import own_folder


@_compat.outside_only
def clear_cache(*, stored: bool = False) -> None:
    """Drop all captures and compiled programs of this process.

    The next call captures its function again. Compilations on disk stay, so it compiles nothing
    that is stored there.

    Args:
        stored: whether to remove the stored compilations too, for all processes of this user.

    Raises:
        ShardError: stored is not a bool.

    Source: jax.clear_caches.

    Example:
        >>> import shardfn as sf
        >>> sf.clear_cache()
    """
    accept("clear_cache", stored=stored)
    cache.clear()
    where = own_folder() if stored else None
    if where is not None:
        where.clear()
