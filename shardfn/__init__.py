"""shardfn: composable function transforms for distributed PyTorch."""

from torch.distributed.tensor import Partial, Replicate, Shard

from ._tree import tree_map
from .buckets import Bucket, BucketPlan
from .errors import (
    BudgetError,
    CaptureError,
    DivergenceError,
    FakeValueError,
    PlacementError,
    RuleError,
    ShardError,
    TreeError,
)
from .mesh import current_mesh, make_mesh, use_mesh
from .placements import P
from .transforms import (
    accumulate,
    bucketed_grad,
    check,
    compose,
    constrain,
    distribute,
    from_local,
    full,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jit,
    jvp,
    linearize,
    rule,
    shard,
    value_and_grad,
    vjp,
    vmap,
)
from .types import ShapeDtype
from .world import fake_world

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "BucketPlan",
    "BudgetError",
    "CaptureError",
    "DivergenceError",
    "FakeValueError",
    "P",
    "Partial",
    "PlacementError",
    "Replicate",
    "RuleError",
    "ShapeDtype",
    "Shard",
    "ShardError",
    "TreeError",
    "accumulate",
    "bucketed_grad",
    "check",
    "compose",
    "constrain",
    "current_mesh",
    "distribute",
    "fake_world",
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
    "make_mesh",
    "rule",
    "shard",
    "tree_map",
    "use_mesh",
    "value_and_grad",
    "vjp",
    "vmap",
]
