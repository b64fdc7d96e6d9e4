"""The training step of a Llama as torchtitan runs it: float32 parameters and AdamW, computed in
bfloat16, fully sharded, with or without tensor and sequence parallelism.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F

import shardfn as sf
from bench.planner.llama import HEAD, turned
from shardfn import P

Tensor = torch.Tensor
Params = dict[str, Any]
Links = Mapping[str, sf.Link] | None
SAVED = "saved"
SCATTERED = P("dp", "tp")
# torchtitan's selective recomputation, `op`: attention and every second product are saved
SELECTIVE = sf.checkpoint_policies.save_only_these_names(SAVED)
FULL = sf.checkpoint_policies.nothing_saveable
NONE = sf.checkpoint_policies.everything_saveable
save = functools.partial(sf.checkpoint_name, name=SAVED)
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@attrs.frozen
class Llama:
    """The sizes of a Llama."""

    width: int
    inner: int
    layers: int
    words: int = 128256
    groups: int = 8  # heads of keys and values


@attrs.frozen
class Run:
    """How a Llama was run.

    Args:
        model: its sizes.
        batch: sequences of each group of ranks that holds them.
        context: tokens of a sequence.
        dp: ranks over which parameters are sharded.
        tp: ranks of tensor parallelism, with sequence parallelism. 1: none.
        policy: the residuals that a layer saves.
        is_stacked: whether one scan runs the layers. Otherwise they are written out.
        backend: "inductor" or "aten".
        updates: whether AdamW updates the parameters. Otherwise the step is the gradient alone.
        holds: whether the last product of a layer stays until its backward, which does not read it,
            as with torch's selective recomputation in eager mode.
    """

    model: Llama
    batch: int
    context: int = 8192
    dp: int = 8
    tp: int = 1
    policy: str = SELECTIVE
    is_stacked: bool = False
    backend: str = "inductor"
    updates: bool = False
    holds: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a step for each GPU."""
        return self.batch * self.context // self.tp


EIGHT = Llama(width=4096, inner=14336, layers=32)
SEVENTY = Llama(width=8192, inner=28672, layers=80)


def normed(x: Tensor, w: Tensor) -> Tensor:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    return (x * scale).to(x.dtype) * w


def attended(x: Tensor, p: Params) -> Tensor:
    """Causal attention. Its results have names, as one of them is no result of torch's function."""
    heads, groups = (p[name].shape[-1] // HEAD for name in ("wq", "wk"))
    q = save(x @ p["wq"]).unflatten(-1, (heads, HEAD)).transpose(1, 2)
    k = (x @ p["wk"]).unflatten(-1, (groups, HEAD)).transpose(1, 2)
    v = save(x @ p["wv"]).unflatten(-1, (groups, HEAD)).transpose(1, 2)
    k, v = (
        turned(k).repeat_interleave(heads // groups, 1),
        v.repeat_interleave(heads // groups, 1),
    )
    out, _ = save(ATTENTION(turned(q), k, v, 0.0, True))
    return out.transpose(1, 2).flatten(2) @ p["wo"]


@sf.custom_vjp
def gathered(x: Tensor) -> Tensor:
    """Gather sequences; their gradients are scattered."""
    return sf.constrain(x, P("dp"))


gathered.defvjp(lambda x: (gathered(x), None), lambda _, g: (sf.constrain(g, SCATTERED),))


def scattered(x: Tensor) -> Tensor:
    """Scatter sequences over tp."""
    return sf.constrain(x, SCATTERED)


def as_it_is(x: Tensor) -> Tensor:
    """Leave the placement free."""
    return x


@sf.custom_vjp
def held(x: Tensor) -> Tensor:
    """Let a value stay until its backward."""
    return x


held.defvjp(lambda x: (x, x), lambda x, g: (g + 0 * x,))


def layer(x: Tensor, p: Params, run: Run) -> Tensor:
    """A layer. Under tensor parallelism its products see gathered sequences, and norms scattered
    ones.
    """
    gather, scatter = (gathered, scattered) if run.tp > 1 else (as_it_is, as_it_is)
    x = x + scatter(attended(gather(normed(x, p["n1"])), p))
    h = gather(normed(x, p["n2"]))
    y = (F.silu(save(h @ p["wg"])) * (h @ p["wu"])) @ p["wd"]
    return x + scatter(held(save(y)) if run.holds else y)


def checkpointed(x: Tensor, p: Params, run: Run) -> Tensor:
    """A layer whose backward computes again what the policy does not save."""
    return sf.checkpoint(functools.partial(layer, run=run), policy=run.policy)(x, p)


def logits_of(x: Tensor, head: Tensor) -> Tensor:
    """The product with the head, which torchtitan leaves in bfloat16."""
    return x @ head


def seconds(step: Any, hardware: sf.Hardware, links: Links = None) -> float:
    """The time of a step whose head is in 16 bits even if other products are in 8."""
    time = step.time(hardware, links)
    if not hardware.float8:
        return time.total
    wide = step.time(attrs.evolve(hardware, float8=False), links)
    return time.total + _of_head(wide) - _of_head(time)


def _of_head(time: Any) -> float:
    """The time of the products of the head, forwards and backwards."""
    line = f"{__file__}:{logits_of.__code__.co_firstlineno + 2}"
    rows = [row.seconds for row in time.ops if row.source == line and row.name == "mm"]
    assert rows, "no product stands in the line of the head"
    return sum(rows)


def embedded(params: Params, tokens: Tensor, run: Run) -> Tensor:
    """The embedded tokens."""
    x = F.embedding(tokens, params["emb"])
    return scattered(x) if run.tp > 1 else x


def logits(x: Tensor, params: Params, run: Run) -> Tensor:
    """The logits, from what the last layer gives."""
    x = normed(x, params["n"])
    return logits_of(gathered(x) if run.tp > 1 else x, params["head"])


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The loss."""
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def loss(params: Params, tokens: Tensor, run: Run) -> Tensor:
    """The loss of a Llama."""
    one = functools.partial(checkpointed, run=run)
    x = embedded(params, tokens, run)
    if run.is_stacked:
        x, _ = sf.scan(lambda x, p: (one(x, p), None), x, params["layers"])
    else:
        for p in params["layers"]:
            x = one(x, p)
    return loss_of(logits(x, params, run), tokens)


def shapes(run: Run) -> Params:
    """The parameters."""
    m = run.model
    keys = m.groups * HEAD
    one = dict(
        n1=(m.width,),
        n2=(m.width,),
        wq=(m.width, m.width),
        wk=(m.width, keys),
        wv=(m.width, keys),
        wo=(m.width, m.width),
        wg=(m.width, m.inner),
        wu=(m.width, m.inner),
        wd=(m.inner, m.width),
    )
    stacked = {name: sf.ShapeDtype((m.layers, *shape)) for name, shape in one.items()}
    each = {name: sf.ShapeDtype(shape) for name, shape in one.items()}
    layers = stacked if run.is_stacked else [each] * m.layers
    words, width = m.words, m.width
    emb, head, n = (sf.ShapeDtype(x) for x in ((words, width), (width, words), (width,)))
    return dict(emb=emb, layers=layers, n=n, head=head)


def placements(run: Run) -> Params:
    """Where the parameters lie: sharded over dp, and over tp by columns or rows."""
    tp = "tp" if run.tp > 1 else None
    column, row = ("dp", tp), (tp, "dp")
    names = dict(wq=column, wk=column, wv=column, wo=row, wg=column, wu=column, wd=row)
    one: dict[str, tuple[str | None, ...]] = dict(n1=("dp",), n2=("dp",), **names)
    stacked = {name: P(None, *parts) for name, parts in one.items()}
    each = {name: P(*parts) for name, parts in one.items()}
    layers = stacked if run.is_stacked else [each] * run.model.layers
    emb = P(tp, "dp") if tp else P("dp")
    return dict(emb=emb, layers=layers, n=P("dp"), head=P("dp", tp) if tp else P("dp"))


def lowered(run: Run) -> Any:
    """The step, lowered for rank 0."""
    opt = sf.optim(torch.optim.AdamW, lr=1e-3)
    gradient = sf.bucketed_grad(sf.mixed_precision(functools.partial(loss, run=run)))

    def update(params: Params, state: Any, tokens: Tensor) -> Any:
        value, grads = gradient(params, tokens)
        return *opt.update(params, grads, state), value

    params, where = shapes(run), placements(run)
    tokens = sf.ShapeDtype((run.batch * run.dp, run.context), torch.int64)
    with sf.fake_world(run.dp * run.tp, numerics=False):
        mesh = sf.make_mesh((run.dp, run.tp), ("dp", "tp"))
        options: dict[str, Any] = dict(backend=run.backend, planner="greedy")
        if not run.updates:
            return sf.shard(gradient, mesh, (where, P("dp")), **options).lower(params, tokens)
        state = opt.init(params)
        of_state = opt.state_placements(where, params)
        step = sf.shard(update, mesh, (where, of_state, P("dp")), donate_argnums=(0, 1), **options)
        return step.lower(params, state, tokens)


@attrs.frozen
class Line:
    """A step of a model of many equal layers, from two of few layers: a straight line through their
    figures is read at the layers of the model.
    """

    layers: int
    few: tuple[int, int]
    steps: tuple[Any, Any]

    def seconds(self, hardware: sf.Hardware, links: Links = None) -> float:
        """The time of a step."""
        first, second = (seconds(step, hardware, links) for step in self.steps)
        return first + (self.layers - self.few[0]) * (second - first) / (self.few[1] - self.few[0])


def line_of(run: Run, few: tuple[int, int] = (2, 4)) -> Line:
    """Lower a step with few layers, twice."""
    models = [attrs.evolve(run.model, layers=n) for n in few]
    first, second = (lowered(attrs.evolve(run, model=model)) for model in models)
    return Line(run.model.layers, few, (first, second))
