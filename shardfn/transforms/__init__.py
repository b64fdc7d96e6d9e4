"""The transforms: one family per file."""

from ._accumulate import accumulate
from ._bucketed_grad import bucketed_grad
from ._check import check
from ._compose import compose
from ._constrain import constrain
from ._functionalize import functionalize
from ._grad import grad, value_and_grad
from ._jacobian import hessian, jacfwd, jacrev
from ._jit import jit
from ._linear import jvp, linearize, vjp
from ._rule import rule
from ._shard import shard
from ._values import distribute, from_local, full
from ._vmap import vmap

__all__ = [
    "accumulate",
    "bucketed_grad",
    "check",
    "compose",
    "constrain",
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
    "rule",
    "shard",
    "value_and_grad",
    "vjp",
    "vmap",
]
