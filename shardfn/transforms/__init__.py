"""The transforms: one family per file."""

from . import checkpoint_policies
from ._accumulate import accumulate
from ._bucketed_grad import bucketed_grad
from ._check import check
from ._checkpoint import checkpoint, checkpoint_name
from ._compose import compose
from ._constrain import constrain
from ._control import cond, map, scan, while_loop
from ._custom import custom_jvp, custom_vjp
from ._functionalize import functionalize
from ._grad import grad, value_and_grad
from ._jacobian import hessian, jacfwd, jacrev
from ._jit import jit
from ._linear import jvp, linearize, vjp
from ._residuals import Residual, Residuals, saved_residuals
from ._rule import rule
from ._shard import shard
from ._values import distribute, from_local, full
from ._vmap import vmap

__all__ = [
    "Residual",
    "Residuals",
    "accumulate",
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
    "rule",
    "saved_residuals",
    "scan",
    "shard",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
