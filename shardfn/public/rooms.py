"""The public names of the optional packages. The first use of such a name imports this file."""

from ..pictures.draw import draw
from ..proof.audits.audit import audit
from ..proof.audits.audited import Audit
from ..proof.comparisons.compare import compare
from ..proof.comparisons.inspect_ranks import first_nan, inspect_ranks
from ..proof.locks.lock import lock
from ..proof.over_meshes.meshes import meshes
from ..reports.report import Report, report
from ..sweeps.plan import plan
from ..sweeps.sweep import sweep
from ..sweeps.table import Sweep
from ..training.checkpoints import Saving, load, load_safetensors, save, save_safetensors
from ..training.clip import clip_by_global_norm
from ..training.data import Loader, loader
from ..training.ema import ema
from ..training.loss_scale import loss_scale
from ..training.mixed_precision import mixed_precision
from ..training.optim.optimizer import optim
from ..training.plans import Strategy, fsdp, placements, strategy
