"""The transforms: one family per file."""

from ._accumulate import accumulate
from ._bucketed_grad import bucketed_grad
from ._check import check
from ._collectives import all_gather, axis_index, axis_size, pmax, pmean, pmin, psum
from ._compose import compose
from ._constrain import constrain
from ._exchanges import all_to_all, ppermute, psum_scatter
from ._grad import grad, value_and_grad
from ._jacobian import hessian, jacfwd, jacrev
from ._linear import jvp, linearize, vjp
from ._rule import rule
from ._shard import shard
from ._shard_map import shard_map
from ._values import distribute, from_local, full
from ._vmap import vmap

__all__ = [
    "accumulate",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "bucketed_grad",
    "check",
    "compose",
    "constrain",
    "distribute",
    "from_local",
    "full",
    "grad",
    "hessian",
    "jacfwd",
    "jacrev",
    "jvp",
    "linearize",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "rule",
    "shard",
    "shard_map",
    "value_and_grad",
    "vjp",
    "vmap",
]
