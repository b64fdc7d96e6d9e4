"""`sf.random`: random numbers that depend only on a key and on the index of the element in the
global tensor, so that every mesh draws the same numbers.

Example:
    >>> import torch, shardfn as sf
    >>> draw = lambda key: sf.random.normal(key, (4, 3))
    >>> key = sf.random.key(0)
    >>> with sf.fake_world(2):
    ...     mesh = sf.make_mesh((2,), ("dp",))
    ...     sharded = sf.full(sf.shard(draw, mesh, sf.P(), sf.P("dp"))(key))
    >>> torch.equal(sharded, draw(key))
    True
"""

from .ambient import state
from .arrays import choice, dropout, permutation
from .continuous import beta, exponential, gamma, gumbel, normal, truncated_normal, uniform
from .discrete import bernoulli, bits, categorical, randint
from .keys import fold_in, key, split
from .plain import plain

__all__ = [
    "bernoulli",
    "beta",
    "bits",
    "categorical",
    "choice",
    "dropout",
    "exponential",
    "fold_in",
    "gamma",
    "gumbel",
    "key",
    "normal",
    "permutation",
    "plain",
    "randint",
    "split",
    "state",
    "truncated_normal",
    "uniform",
]
