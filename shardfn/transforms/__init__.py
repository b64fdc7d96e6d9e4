"""The function transforms, one family per file."""

from ._compose import compose
from ._dynamic import mark_dynamic
from ._functionalize import functionalize
from ._init import init
from ._jit import jit
from ._stored import clear_cache, load_compiled
from ._vmap import vmap
from .control_flow import _functions, _torchs  # noqa: F401  (enter them in a table)
from .control_flow._cond_while import cond, while_loop
from .control_flow._scan import map, scan
from .derivatives import checkpoint_policies
from .derivatives._accumulate import accumulate
from .derivatives._bucketed_grad import bucketed_grad
from .derivatives._checkpoint import checkpoint, checkpoint_name
from .derivatives._custom_jvp import custom_jvp
from .derivatives._custom_vjp import custom_vjp
from .derivatives._grad import grad, value_and_grad
from .derivatives._jacobian import hessian, jacfwd, jacrev
from .derivatives._pipelined_grad import pipelined_grad
from .derivatives._residuals import Residual, Residuals, saved_residuals
from .derivatives._vjp_jvp import jvp, linearize, vjp
from .dtensors import (  # noqa: F401  (enter them in a table)
    _collectives,
    _dtensor_methods,
    _fully_shard_hooks,
    _functional_collectives,
    _list_collectives,
    _loss_parallel,
    _nn_functional,
    _rank_queries,
)
from .proofs._budget import assert_comms, explain
from .proofs._check import check
from .proofs._retrace import explain_retrace
from .proofs._rule import rule
from .sharding._collectives import all_gather, axis_index, axis_size, pmax, pmean, pmin, psum, pvary
from .sharding._constrain import constrain
from .sharding._distribute import distribute, from_local, full
from .sharding._pin import pin
from .sharding._ragged import ragged_all_to_all
from .sharding._scatter import all_to_all, ppermute, psum_scatter
from .sharding._shard import shard
from .sharding._shard_map import shard_map

__all__ = [
    "Residual",
    "Residuals",
    "accumulate",
    "all_gather",
    "all_to_all",
    "assert_comms",
    "axis_index",
    "axis_size",
    "bucketed_grad",
    "check",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "clear_cache",
    "compose",
    "cond",
    "constrain",
    "custom_jvp",
    "custom_vjp",
    "distribute",
    "explain",
    "explain_retrace",
    "from_local",
    "full",
    "functionalize",
    "grad",
    "hessian",
    "init",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "linearize",
    "load_compiled",
    "map",
    "mark_dynamic",
    "pin",
    "pipelined_grad",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "ragged_all_to_all",
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
