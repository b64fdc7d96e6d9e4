"""Random losses of trees of parameters for bucketed_grad, and what must hold of every bucket
plan.
"""

from __future__ import annotations

import collections
import itertools
import math
from typing import Any, NamedTuple

import attrs
import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P

WIDTH, ROWS, WORDS = 5, 7, 6
MESHES: tuple[dict[str, int], ...] = (
    {"a": 1},
    {"a": 2},
    {"a": 3},
    {"a": 8},
    {"a": 2, "b": 2},
    {"a": 2, "b": 3},
)
DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16)
CAPS = (1, 40, 200, 900, "1KB", "25MB", "1GB")
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (WIDTH, WIDTH),
    "bias": (WIDTH,),
    "gain": (),
    "table": (WORDS, WIDTH),
    "head": (WIDTH, 3),
    "again": (WIDTH, WIDTH),
    "decayed": (3, 2),
    "unused": (4,),
    "stack": (2, WIDTH, WIDTH),
    "none": (0, 3),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.15}


class Pair(NamedTuple):
    """A container that is neither a dict nor a list."""

    left: Any
    right: Any


@attrs.frozen
class Leaf:
    """One parameter: how the loss uses it, its dtype, and where it lives."""

    use: str
    dtype: torch.dtype
    placed: sf.P
    ignored: bool


@attrs.frozen
class Drawn:
    """A loss of parameters, placements on a mesh, and options of bucketed_grad."""

    mesh: dict[str, int]
    leaves: tuple[Leaf, ...]
    shape: tuple[str, ...]  # of the tree: the container of each leaf
    rows: sf.P  # of the batch
    options: tuple[tuple[str, Any], ...]

    def __repr__(self) -> str:
        said = [
            f"  {i}: {x.use} {x.dtype} {x.placed}{' ignored' if x.ignored else ''}"
            for i, x in enumerate(self.leaves)
        ]
        return "\n".join(
            [
                f"\nmesh {self.mesh}, rows {self.rows}, {dict(self.options)}, tree {self.shape}",
                *said,
            ]
        )

    def tree(self, values: list[Any]) -> Any:
        """The parameters' tree with other leaves: a dict, and in it what `shape` says."""
        made: dict[str, Any] = {}
        for i, (kind, x) in enumerate(zip(self.shape, values, strict=True)):
            key = f"k{(i * 7) % 10}{i}"  # in another order than sorted
            made[key] = {
                "leaf": x,
                "dict": {"b": x},
                "list": [x],
                "tuple": (x, ()),
                "pair": Pair(x, {}),
            }[kind]
        return made

    def flat(self, tree: Any) -> list[Any]:
        """The leaves of such a tree, in the order of `leaves`."""
        inner = {
            "leaf": lambda x: x,
            "dict": lambda x: x["b"],
            "list": lambda x: x[0],
            "tuple": lambda x: x[0],
            "pair": lambda x: x.left,
        }
        return [inner[kind](child) for kind, child in zip(self.shape, tree.values(), strict=True)]

    def params(self) -> Any:
        g = torch.Generator().manual_seed(3)
        return self.tree(
            [
                (torch.randn(SHAPES[x.use], generator=g, dtype=torch.float64) * 0.5).to(x.dtype)
                for x in self.leaves
            ]
        )

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(4)
        return torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64), torch.randint(
            0, WORDS, (ROWS,), generator=g
        )

    def loss(self, params: Any, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        h, total, first = x, x.sum() * 0, None
        for leaf, w in zip(self.leaves, self.flat(params), strict=True):
            y = h.to(leaf.dtype)
            if leaf.use == "matrix":
                h, first = torch.tanh(y @ w).double(), w
            elif leaf.use == "again":  # tied: the same parameter in two places
                h = torch.tanh(torch.tanh(y @ w) @ w.t()).double()
            elif leaf.use == "stack":
                h = torch.tanh(y @ w[0] + y @ w[1]).double()
            elif leaf.use == "bias":
                h = (y + w).double()
            elif leaf.use == "gain":
                h = (y * w).double()
            elif leaf.use == "table":
                h = h + torch.nn.functional.embedding(words, w).double()
            elif leaf.use == "head":
                total = total + ((y @ w) ** 2).double().mean()
            elif leaf.use in ("decayed", "none"):
                total = total + (w * w).sum().double()
        if first is not None:
            total = total + (first * first).sum().double() * 0.1
        return total + (h * h).mean()

    def step(self, transform: Any = None) -> Any:
        """The loss's bucketed_grad, or another transform of it."""
        if transform is not None:
            return transform(self.loss)
        ignored = [i for i, x in enumerate(self.leaves) if x.ignored]
        names = {f"params{path}" for i in ignored for path in [self.paths()[i]]}
        return sf.bucketed_grad(
            self.loss, ignore=names.__contains__ if names else None, **dict(self.options)
        )

    def paths(self) -> list[str]:
        """How each leaf is reached, from the root of the tree."""
        inner = {"leaf": "", "dict": "['b']", "list": "[0]", "tuple": "[0]", "pair": ".left"}
        keys = self.tree([None] * len(self.leaves))
        return [f"[{key!r}]{inner[kind]}" for key, kind in zip(keys, self.shape, strict=True)]

    def sharded(self, mesh: Any, transform: Any = None) -> Any:
        placed = self.tree([x.placed for x in self.leaves])
        return sf.shard(self.step(transform), mesh, (placed, self.rows, self.rows), backend="aten")


def _placements(axes: list[str], dims: int) -> list[sf.P]:
    """Replicated, cut on dim 0 or 1 over an axis, or over two."""
    found = [P()]
    found += [P(*[None] * d, a) for a in axes for d in range(min(dims, 2))]
    if len(axes) > 1 and dims > 0:
        found += [P(tuple(axes))]
    if len(axes) > 1 and dims > 1:
        found += [P(*axes), P(*axes[::-1])]
    return found


@st.composite
def draws(draw: st.DrawFn) -> Drawn:
    """A random loss with placements and options."""
    mesh = draw(st.sampled_from(MESHES))
    axes = list(mesh)
    scheme = draw(st.sampled_from(("replicated", "dim 0", "mixed", "mixed")))
    made = []
    for _ in range(draw(st.integers(1, 7))):
        use = draw(st.sampled_from(list(SHAPES)))
        options = _placements(axes, len(SHAPES[use]))
        placed = (
            P()
            if scheme == "replicated" or not SHAPES[use]
            else P(axes[0])
            if scheme == "dim 0"
            else draw(st.sampled_from(options))
        )
        made.append(
            Leaf(
                use,
                draw(st.sampled_from(DTYPES)),
                placed,
                draw(st.sampled_from((False, False, False, True))),
            )
        )
    shape = draw(
        st.lists(
            st.sampled_from(("leaf", "dict", "list", "tuple", "pair")),
            min_size=len(made),
            max_size=len(made),
        )
    )
    rows = draw(
        st.sampled_from([P(axes[0]), P(axes[-1]), P(tuple(axes)) if len(axes) > 1 else P()])
    )
    cap = draw(st.sampled_from(CAPS))
    options = {"cap": cap}
    if draw(st.booleans()):
        options["first_cap"] = draw(st.sampled_from((1, cap)))
    if draw(st.integers(0, 3)) == 0:
        options["max_in_flight"] = draw(st.sampled_from((1, 300)))
    return Drawn(mesh, tuple(made), tuple(shape), rows, tuple(options.items()))


def world_of(mesh: dict[str, int]) -> Any:
    """A simulated world of the size of a mesh."""
    return sf.fake_world(math.prod(mesh.values()))


def mesh_of(mesh: dict[str, int]) -> Any:
    return sf.make_mesh(tuple(mesh.values()), tuple(mesh))


def autograd(loss: Any, params: Any, *batch: Any) -> Any:
    """(loss, gradients) by torch.autograd on one device."""
    own = sf.tree_map(lambda p: p.clone().requires_grad_(), params)
    value = loss(own, *batch)
    flat = tree_leaves(own)
    found = (
        torch.autograd.grad(value, flat, allow_unused=True)
        if value.requires_grad
        else [None] * len(flat)
    )
    grads = iter(
        [torch.zeros_like(p) if g is None else g for p, g in zip(flat, found, strict=True)]
    )
    return value.detach(), sf.tree_map(lambda p: next(grads), own)


def plan_is_what_runs(low: Any) -> None:
    """Every bucket is one collective and every collective of a bucket is in the plan, on all
    ranks in the same order.
    """
    plan, orders = low.plan, set()
    for program in low.programs.values():
        sent = [n for n in program.graph.nodes if "collective" in n.meta]
        records = [n.meta["collective"] for n in sent]
        orders.add(tuple((r.kind, r.axis, r.op, r.bucket) for r in records))
        numbered = [r.bucket for r in records if r.bucket is not None]
        assert sorted(numbered) == list(range(len(plan.buckets))), f"{numbered}\n{plan}"
        for node, r in zip(sent, records, strict=True):
            if r.bucket is not None:
                b = plan.buckets[r.bucket]
                value = node.args[0].meta["val"]
                assert (r.kind, r.axis, r.op) == (b.kind, b.axis, b.op)
                assert str(value.dtype).removeprefix("torch.") == b.dtype
    assert len(orders) == 1, "ranks start other collectives, or in another order"


def plan_obeys_its_rules(plan: sf.BucketPlan, ignored: set[str]) -> None:
    """What S9 asks of a plan, whatever the program."""
    assert [b.index for b in plan.buckets] == list(range(len(plan.buckets)))
    for b in plan.buckets:
        assert b.leaves and len(b.leaves) == len(b.sizes)
        assert not ignored & set(b.leaves)
        assert sum(b.sizes[:-1]) < b.cap, "a bucket closes when it reaches its cap"
    reduced = collections.Counter(
        (leaf, b.axis) for b in plan.buckets if b.kind != "all_gather" for leaf in b.leaves
    )
    assert all(n == 1 for n in reduced.values()), "a gradient is reduced once over an axis"
    told = [set(plan.unused), set(plan.local), set(plan.ignored), {leaf for leaf, _ in reduced}]
    for a, b in itertools.combinations(told, 2):
        assert not a & b, f"{a & b} is said to be two things\n{plan}"
