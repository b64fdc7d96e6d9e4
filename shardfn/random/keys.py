"""Keys: small int64 tensors that determine random numbers; `key`, `split`, `fold_in`."""

from __future__ import annotations

import torch

from .. import _compat
from ..errors import ShardError, problem
from ..ops.random_bits import DRAW, FOLD_IN, SPLIT, WORD, random_bits, strides_of
from .checks import check_key, check_kind, check_shape, dims_of
from .used import check_key_unused

NUMBER = "an int, or an integer tensor without dims"


def key(seed: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """Make a key from a seed.

    Args:
        seed: an int, of which the low 64 bits are used.
        device: the device of the key, and of the numbers that are drawn from it.

    Returns:
        The key, int64 (2,): the two 32-bit words of the seed.

    Raises:
        ShardError: the seed is not an int.

    Source: jax.random.key.

    Example:
        >>> import shardfn as sf
        >>> sf.random.key(7)
        tensor([7, 0])
    """
    words = words_of(seed)
    return torch.tensor(words, dtype=torch.int64, device=device)


@_compat.constant_in_graph
def words_of(seed: object) -> list[int]:
    """Return the two 32-bit words of a seed.

    Raises:
        ShardError: the seed is not an int.
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        fix = "sf.random.key(0); use sf.random.fold_in(key, n) if the number n is a tensor"
        text = problem("random.key", f"seed is {seed!r}", needed="an int", fix=fix)
        raise ShardError(text, arg_path="seed", fix=fix)
    return [seed & WORD, (seed >> 32) & WORD]


def split(key: torch.Tensor, num: int | tuple[int, ...] = 2) -> torch.Tensor:
    """Split a key into several new keys, after which the old key must not be used.

    Args:
        key: a random key, int64 (2,).
        num: the number of new keys, or the shape of an array of keys.

    Returns:
        The new keys, int64 (num, 2) or (*num, 2), whose streams are independent of each other.

    Raises:
        ShardError: key is not a random key, or num is negative.

    Source: jax.random.split.

    Example:
        >>> import shardfn as sf
        >>> sf.random.split(sf.random.key(0), 3).shape
        torch.Size([3, 2])
    """
    check_key("random.split", key)
    if not _compat.is_tracing():
        check_key_unused("random.split", key)
    shape = dims_of(num)
    check_shape("random.split", _compat.signs(shape))
    return _key_of_bits(
        random_bits(key, None, list(shape), strides_of(shape), SPLIT, 0, torch.int64)
    )


def fold_in(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    """Make a new key from a key and a number, such as the number of a step or a rank.

    Args:
        key: a random key, int64 (2,).
        data: an int, or an integer tensor without dims.

    Returns:
        The new key, int64 (2,).

    Raises:
        ShardError: key is not a random key, or data is not an integer.

    Source: jax.random.fold_in.

    Example:
        >>> import shardfn as sf
        >>> step = sf.random.fold_in(sf.random.key(0), 12)
        >>> sf.random.uniform(step).shape
        torch.Size([])
    """
    check_key("random.fold_in", key)
    if isinstance(data, torch.Tensor):
        got = f"a {data.dtype} tensor of {data.dim()} dims"
        holds = not data.dim() and not (data.dtype.is_floating_point or data.dtype.is_complex)
        check_kind("random.fold_in", "data", got, NUMBER, holds)
        number = data.to(torch.int64)
    else:
        holds = isinstance(data, int) or hasattr(data, "__index__")  # NumPy's integers have it
        check_kind("random.fold_in", "data", f"a {type(data).__name__}", NUMBER, holds)
        fits = -(2**63) <= data < 2**63
        check_kind("random.fold_in", "data", str(data), "an integer of 64 bits", fits)
        number = torch.full((), data, dtype=torch.int64, device=key.device)
    return _key_of_bits(random_bits(key, number, [], [], FOLD_IN, 0, torch.int64))


def _key_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """Split 64 random bits into the two words of a key."""
    return torch.stack([bits & WORD, (bits >> 32) & WORD], -1)


def draw(key: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Draw numbers from a key: uniform in [0, 1) for a floating dtype, else all bits of a dtype."""
    if not _compat.is_tracing():
        check_key_unused("random", key)
    return random_bits(key, None, list(shape), strides_of(shape), DRAW, 0, dtype)
