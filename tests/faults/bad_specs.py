"""Random trees of placements, axes, positions and values for the doors that take trees, and random
values for the methods of what the public functions return: every refusal is an error of our
family, or a TypeError that names the function.

    python -m tests.faults.bad_specs SEED COUNT
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

import shardfn as sf
from shardfn import P
from tests.faults.bad_arguments import BAD, Failure, failure_of

PARTS = (
    *("dp", "tp", None, ("dp", "tp"), ("tp", "dp"), ("dp",), ()),
    *("nope", ("dp", "dp"), "tp*3", "dp*0", "tp*", "*", "", 7, ("dp", None)),
)
KEYS = ("w", "b", "x", 0, 1, None)
DEPTH = 3
Door = Callable[[Any, Callable[[], Any]], Any]
W, X = torch.ones(6, 4), torch.ones(4, 6)


def _step(params: Any, batch: Any) -> Any:
    return {"y": batch[0] @ params["w"] + params["b"], "n": batch[1]}


PARAMS, BATCH = {"w": W, "b": torch.ones(4)}, (X, torch.tensor(3.0))
PAIR = lambda c, x: (c + 1, x)
ANY = lambda *xs: xs


class Specs:
    """A stream of random trees.

    Args:
        seed: of the stream.
    """

    def __init__(self, seed: int) -> None:
        self.chosen = random.Random(seed)
        self.drawn: list[Any] = []  # since it was last emptied

    @property
    def said(self) -> str:
        """What was drawn, as short text."""
        return ", ".join(" ".join(repr(x).split())[:200] for x in self.drawn)

    def tree(self, depth: int = DEPTH) -> Any:
        """A leaf, or a container of trees."""
        self.drawn.append(self._tree(depth))
        return self.drawn[-1]

    def near(self, right: Any) -> Any:
        """A right tree in which some parts are others, missing or more."""
        self.drawn.append(self._near(right))
        return self.drawn[-1]

    def part(self) -> Any:
        return self.chosen.choice(PARTS)

    def placement(self) -> Any:
        """P of random parts, or a placement of torch."""
        chosen = self.chosen
        if chosen.random() < 0.7:
            return _placement([self.part() for _ in range(chosen.randrange(4))])
        dim = chosen.choice((0, 1, -1, 2, 7))
        return chosen.choice((sf.Shard(dim), sf.Replicate(), sf.Partial()))

    def leaf(self) -> Any:
        """A value that fits some door, or none."""
        kind = self.chosen.random()
        if kind < 0.4:
            return self.placement()
        if kind < 0.6:
            return self.chosen.choice((0, 1, 2, -1, -3, 5, None, True))
        return self.chosen.choice(BAD)

    def _tree(self, depth: int) -> Any:
        chosen = self.chosen
        if depth == 0 or chosen.random() < 0.35:
            return self.leaf()
        parts = [self._tree(depth - 1) for _ in range(chosen.randrange(4))]
        keys = chosen.sample(KEYS, len(parts))
        kinds = (tuple, list, lambda xs: dict(zip(keys, xs, strict=True)))
        return chosen.choice(kinds)(parts)

    def _near(self, right: Any) -> Any:
        chosen = self.chosen
        if chosen.random() < 0.3:
            return self._tree(1)
        if isinstance(right, dict):
            kept = {k: self._near(x) for k, x in right.items() if chosen.random() < 0.9}
            return kept | ({"more": self.leaf()} if chosen.random() < 0.1 else {})
        if isinstance(right, (tuple, list)):
            parts = [self._near(x) for x in right if chosen.random() < 0.9]
            more = [self.leaf()] if chosen.random() < 0.1 else []
            return type(right)([*parts, *more])
        return right

    def text(self) -> str:
        """JSON of a random tree, or a part of one."""
        text = json.dumps(self._tree(DEPTH), default=repr, skipkeys=True)
        return text[: self.chosen.randrange(len(text) + 1)]


def _placement(parts: list[Any]) -> Any:
    try:
        return P(*parts)
    except sf.ShardError:
        return tuple(parts)


def doors(mesh: Any, specs: Specs) -> dict[str, Callable[[Any], Any]]:
    """What a random tree is given to, by name, with a right one to start from."""
    batch = P("dp")
    in_specs = ({"w": P(None, "tp"), "b": P("tp")}, (batch, P()))
    out_specs = {"y": P("dp", "tp"), "n": P()}
    loss = lambda p, b: _step(p, b)["y"].sum()
    sharded = lambda i, o: sf.shard(_step, mesh, i, o, backend="aten")
    mapped = lambda i, o: sf.shard_map(_step, mesh, i, o, backend="aten")
    near, tree = specs.near, specs.tree
    return {
        "shard": lambda: sharded(near(in_specs), None)(PARAMS, BATCH),
        "shard(out)": lambda: sharded(None, near(out_specs))(PARAMS, BATCH),
        "shard(any)": lambda: sharded(tree(), tree())(PARAMS, BATCH),
        "shard(args)": lambda: sharded(in_specs, None)(near(PARAMS), near(BATCH)),
        "shard_map": lambda: mapped(near(in_specs), P())(PARAMS, BATCH),
        "shard_map(out)": lambda: mapped(P(), near(out_specs))(PARAMS, BATCH),
        "distribute": lambda: sf.distribute(PARAMS, mesh, near(in_specs[0])),
        "from_local": lambda: sf.from_local(W, mesh, tree()),
        "constrain": lambda: sf.jit(lambda x: sf.constrain(x, tree()))(X),
        "vmap": lambda: sf.vmap(loss, near(({"w": 0, "b": 0}, (0, None))), near(0))(PARAMS, BATCH),
        "grad": lambda: sf.grad(loss, near((0, 1)))(PARAMS, BATCH),
        "value_and_grad": lambda: sf.value_and_grad(loss, tree(1))(PARAMS, BATCH),
        "hessian": lambda: sf.hessian(loss, tree(1))(PARAMS, BATCH),
        "jvp": lambda: sf.jvp(loss, near((PARAMS, BATCH)), near((PARAMS, BATCH))),
        "vjp": lambda: sf.vjp(_step, PARAMS, BATCH)[1](near({"y": X @ W, "n": W[0, 0]})),
        "scan": lambda: sf.scan(PAIR, near(torch.zeros(())), near({"x": X})),
        "map": lambda: sf.map(ANY, tree()),
        "make_mesh": lambda: sf.make_mesh(near((2, 2)), near(("dp", "tp"))),
        "shard(static)": lambda: sf.shard(_step, mesh, backend="aten", static_argnums=tree(1))(
            PARAMS, BATCH
        ),
        "shard(donate)": lambda: sf.shard(_step, mesh, backend="aten", donate_argnums=tree(1))(
            PARAMS, BATCH
        ),
        "bucketed_grad": lambda: sf.bucketed_grad(loss, ignore=tree())(PARAMS, BATCH),
        "accumulate": lambda: sf.accumulate(sf.grad(loss), 2, batch_argnums=tree(1))(PARAMS, BATCH),
        "placements": lambda: sf.placements(PARAMS, near({"w": P("dp"), "b": P()}), mesh=mesh),
        "strategy": lambda: sf.strategy("zero1", near(PARAMS), mesh, axis=tree(1)),
        "fsdp": lambda: sf.fsdp(near(PARAMS), mesh, axis=tree(1)),
        "check": lambda: sf.check(loss, PARAMS, BATCH, worlds=tree(1)),
        "from_json": lambda: sf.BucketPlan.from_json(specs.text()),
        "P": lambda: P(*[specs.leaf() for _ in range(3)]),
        "ShapeDtype": lambda: sf.ShapeDtype(tree(), specs.leaf()),
        "cond": lambda: sf.cond(tree(1), ANY, ANY, near({"x": X})),
        "while_loop": lambda: sf.while_loop(lambda c: specs.leaf(), lambda c: tree(), X),
        "ppermute": lambda: sf.shard_map(
            lambda x: sf.ppermute(x, specs.part(), near(((0, 1), (1, 0)))),
            mesh,
            batch,
            batch,
            backend="aten",
        )(X),
        "psum": lambda: sf.shard_map(
            lambda x: sf.psum(x, tree(1)), mesh, batch, batch, backend="aten"
        )(X),
    }


def failures(seed: int, count: int, names: list[str] | None = None) -> list[Failure]:
    """The refusals in somebody else's words, of so many random trees."""
    specs, found = Specs(seed), []
    with sf.fake_world(4), warnings.catch_warnings(action="ignore"):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        rows = doors(mesh, specs)
        chosen = [name for name in rows if not names or name in names]
        for number in range(count):
            name = chosen[number % len(chosen)]
            specs.drawn.clear()
            words = failure_of(name.split("(")[0], rows[name])
            if words is not None:
                found.append(Failure(f"{name}: {specs.said}", words))
    return found


def main() -> None:
    """Print the failures of a seed."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(2**32)
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    print(f"seed {seed}, {count} trees")
    found = failures(seed, count, sys.argv[3:])
    for row in found:
        print(f"{row.call}\n    {row.error}")
    print(f"{len(found)} unnamed errors")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
