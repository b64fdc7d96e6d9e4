"""The transforms: one family per file."""

from . import checkpoint_policies
from ._accumulate import accumulate
from ._bucketed_grad import bucketed_grad
from ._check import check
from ._checkpoint import checkpoint, checkpoint_name
from ._collectives import all_gather, axis_index, axis_size, pmax, pmean, pmin, psum
from ._compose import compose
from ._constrain import constrain
from ._control import cond, map, scan, while_loop
from ._custom import custom_jvp, custom_vjp
from ._exchanges import all_to_all, ppermute, psum_scatter
from ._functionalize import functionalize
from ._grad import grad, value_and_grad
from ._jacobian import hessian, jacfwd, jacrev
from ._jit import jit
from ._linear import jvp, linearize, vjp
from ._residuals import Residual, Residuals, saved_residuals
from ._rule import rule
from ._shard import shard
from ._shard_map import shard_map
from ._values import distribute, from_local, full
from ._vmap import vmap

__all__ = [
    "Residual",
    "Residuals",
    "accumulate",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "bucketed_grad",
    "check",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "compose",
    "cond",
    "constrain",
    "custom_jvp",
    "custom_vjp",
    "distribute",
    "from_local",
    "full",
    "functionalize",
    "grad",
    "hessian",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "linearize",
    "map",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "rule",
    "saved_residuals",
    "scan",
    "shard",
    "shard_map",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
