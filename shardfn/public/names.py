"""The public names. The first one that is read imports this file."""

from .. import debug, random
from .._tree import tree_map
from ..buckets import Bucket, BucketPlan
from ..checkpoints import Saving, load, load_safetensors, save, save_safetensors
from ..data import Loader, loader
from ..errors import (
    ArtefactError,
    BudgetError,
    CaptureError,
    CheckpointError,
    DivergenceError,
    FakeValueError,
    PlacementError,
    RankLostError,
    RendezvousError,
    RuleError,
    ShardError,
    TorchVersionError,
    TreeError,
)
from ..hardware import Hardware, Link
from ..inspect.budget import Explanation
from ..inspect.measured import measure_hardware
from ..mesh import current_mesh, make_mesh, use_mesh
from ..placement import AUTO as auto
from ..placement import P, Partial, Replicate, Shard
from ..plans import Strategy, fsdp, placements, strategy
from ..ranks.versions import VERSION as __version__
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
    clip_by_global_norm,
    compose,
    cond,
    constrain,
    custom_jvp,
    custom_vjp,
    distribute,
    ema,
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
    loss_scale,
    map,
    mark_dynamic,
    mixed_precision,
    optim,
    pin,
    plan,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    pvary,
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
