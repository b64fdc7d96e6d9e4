"""The public names of the core. The first use of a public name imports this file."""

from .. import debug, random
from .._compat.versions import VERSION as __version__
from .._tree import tree_map
from ..buckets import Bucket, BucketPlan
from ..errors import (
    ArtefactError,
    BudgetError,
    CapacityError,
    CaptureError,
    CheckpointError,
    DivergenceError,
    FakeValueError,
    PlacementError,
    RankLostError,
    RendezvousError,
    RuleError,
    ScheduleError,
    ShardError,
    TorchVersionError,
    TreeError,
)
from ..hardware import Efficiency, Hardware, Link
from ..inspect.budget import Explanation
from ..inspect.measured import measure_hardware
from ..inspect.timeline.overlay import overlay
from ..mesh import current_mesh, make_mesh, use_mesh
from ..pipelines import Schedule, schedules
from ..placement import AUTO as auto
from ..placement import P, Partial, Replicate, Shard, Stage, Zigzag, zigzag
from ..transforms import (
    accumulate,
    all_gather,
    all_to_all,
    assert_comms,
    axis_index,
    axis_size,
    bucketed_grad,
    check,
    checkpoint,
    checkpoint_name,
    clear_cache,
    compose,
    cond,
    constrain,
    custom_jvp,
    custom_vjp,
    distribute,
    explain,
    explain_retrace,
    from_local,
    full,
    functionalize,
    grad,
    hessian,
    init,
    jacfwd,
    jacrev,
    jit,
    jvp,
    linearize,
    load_compiled,
    map,
    mark_dynamic,
    pin,
    pipelined_grad,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    pvary,
    ragged_all_to_all,
    rule,
    saved_residuals,
    scan,
    shard,
    shard_map,
    value_and_grad,
    vjp,
    vmap,
    while_loop,
)
from ..transforms.derivatives import checkpoint_policies
from ..types import ShapeDtype
from ..world import fake_world
