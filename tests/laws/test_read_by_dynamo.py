"""Every function of the library that Dynamo reads is marked: by `_compat.read_by_dynamo`, or by
the sentence "Dynamo reads this." in the docstring of its file.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import symbolic_convert
from worlds import simulated

import shardfn as sf
from shardfn import P
from tests.support.reading.source import PACKAGE, ROOT

SENTENCE, DECORATOR = "Dynamo reads this.", "read_by_dynamo"
Read = set[tuple[Path, str]]  # (file, qualified name) of each function

X, W = (torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(0, 1, 9).reshape(3, 3))


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh().square().sum()


@sf.custom_vjp
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.defvjp(lambda x: (doubled(x), x), lambda x, g: (2 * g,))


@sf.custom_jvp
def tripled(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


tripled.defjvp(lambda primals, tangents: (tripled(*primals), 3 * tangents[0]))


def branches(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return sf.cond(x.sum() > 0, lambda w: w.sin().sum(), lambda w: w.sum(), w)


def steps(w: torch.Tensor, x: torch.Tensor) -> Any:
    carry, rows = sf.scan(lambda c, row: (c + row @ w, row.sum()), X[0], x)
    return carry.sum() + rows.sum() + sf.map(torch.sin, x).sum()


def exchanged(x: torch.Tensor) -> torch.Tensor:
    """Collectives of per-rank code, and of samples."""
    y = sf.psum(x, "i") + sf.pmean(x, "i") * sf.axis_index("i") + sf.pmax(x, "i")
    y = y + sf.ppermute(x, "i", [(0, 1), (1, 0)]) - sf.pmin(x, "i")
    rows, counts = sf.ragged_all_to_all(x, [1, 0], "i", rows=x.shape[0])
    y = y + rows + counts.sum()
    y = y + sf.psum_scatter(sf.all_gather(x, "i"), "i")
    return y + sf.all_to_all(torch.stack([x, x]), "i", 0, 0)[0] / sf.axis_size("i")


def modules(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return MODULE({"weight": w}, {}, x)[0].sum()


def substituted(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Functions of torch that Dynamo takes ours for, and trees of the user's."""
    likely = F.gaussian_nll_loss(x, 2 * x, x.square() + 1)
    pair = sf.tree_map(torch.sin, {"w": w, "x": [x]})
    return likely + torch.cov(x).sum() + torch.corrcoef(w).sum() + pair["w"].sum()


def stepped(params: Any) -> Any:
    return OPT.update(params, params, OPT.init(params, lr=0.2), lr=0.1)


def averaged(params: Any) -> Any:
    ema = sf.ema(0.9, debias=True)
    return ema.average(ema.update(params, ema.init(params)))


def scaled(w: torch.Tensor) -> Any:
    scaler = sf.loss_scale()
    state = scaler.init()
    grads, finite = scaler.unscale(w + scaler.scale(w.sum(), state), state)
    return scaler.select(finite, grads, w), scaler.update(state, finite)


OPT = sf.optim(torch.optim.AdamW)
MODULE, *_ = sf.functionalize(torch.nn.Linear(3, 3, bias=False))
kept = sf.checkpoint(lambda w, x: sf.checkpoint_name((x @ w).tanh(), "h").sum())
PROGRAMS: dict[str, Callable[[], Any]] = {
    "_grad": lambda: sf.jit(sf.grad(sf.grad(torch.sin))).trace(X[0, 0]),
    "_vjp_jvp": lambda: sf.jit(linear).trace(W, X),
    "_jacobian": lambda: sf.jit(sf.hessian(loss)).trace(W, X),
    "_vmap": lambda: sf.jit(sf.vmap(exchanged, axis_name="i")).trace(X),
    "_scan": lambda: sf.jit(sf.grad(steps)).trace(W, X),
    "_cond_while": lambda: sf.jit(sf.grad(branches)).trace(W, X),
    "_custom_vjp": lambda: sf.jit(sf.grad(lambda x: doubled(x).sum())).trace(X),
    "_custom_jvp": lambda: sf.jit(lambda x: sf.jvp(tripled, (x,), (x,))).trace(X),
    "_checkpoint": lambda: sf.jit(sf.grad(kept)).trace(W, X),
    "_bucketed_grad": lambda: sf.jit(sf.bucketed_grad(loss)).trace(W, X),
    "_accumulate": lambda: sf.jit(sf.accumulate(sf.value_and_grad(loss), 2)).trace(W, X),
    "_functionalize": lambda: sf.jit(sf.grad(modules)).trace(W, X),
    "optimizer": lambda: sf.jit(stepped).trace({"w": W}),
    "ema": lambda: sf.jit(averaged).trace({"w": W}),
    "loss_scale": lambda: sf.jit(scaled).trace(W),
    "clip": lambda: sf.jit(sf.clip_by_global_norm).trace({"w": W}, 1.0),
    "python_substitutes": lambda: sf.jit(sf.grad(substituted)).trace(W, X),
    "_transformed": lambda: sf.jit(sf.compose(sf.grad, sf.jit)(loss)).trace(W, X),
    "_residuals": lambda: sf.saved_residuals(loss, W, X),
}


def linear(w: torch.Tensor, x: torch.Tensor) -> Any:
    value, pull = sf.vjp(loss, w, x)
    _, dot = sf.jvp(loss, (w, x), (w, x))
    _, push = sf.linearize(loss, w, x)
    return value, pull(value), dot, push(w, x)


@contextmanager
def recorded() -> Iterator[Read]:
    """The functions of the library that Dynamo reads meanwhile."""
    read: Read = set()
    translators = (
        symbolic_convert.InliningInstructionTranslator,
        symbolic_convert.InstructionTranslator,
    )

    def note(init: Callable[..., None]) -> Callable[..., None]:
        def noting(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            path = Path(self.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                read.add((path, self.f_code.co_qualname))

        return noting

    with pytest.MonkeyPatch.context() as patch:
        for kind in translators:
            patch.setattr(kind, "__init__", note(kind.__init__))
        yield read


def marked(text: str) -> Callable[[str], bool]:
    """Whether a function of a file is marked, by its qualified name; a function inside another
    counts as that one.
    """
    tree = ast.parse(text)
    if SENTENCE in (ast.get_docstring(tree) or ""):
        return lambda _: True
    names = {
        name
        for name, node in functions(tree)
        if any(ast.unparse(d).endswith(DECORATOR) for d in node.decorator_list)
    }
    return lambda name: any(f"{name}.".startswith(f"{known}.") for known in names)


def functions(parent: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(qualified name, node) of every function."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.<locals>.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def unmarked(read: Read) -> list[str]:
    """The functions among those read that have no mark."""
    known = {path: marked(path.read_text()) for path, _ in read}
    return [
        f"{path.relative_to(ROOT).as_posix()}: {name}"
        for path, name in sorted(read)
        if not known[path](name)
    ]


def said(bad: list[str]) -> str:
    head = f"Dynamo reads these; put @_compat.{DECORATOR} on them, or {SENTENCE!r} in the file:"
    return "\n  ".join([head, *bad])


@pytest.mark.parametrize("file", PROGRAMS)
def test_every_function_that_dynamo_reads_is_marked(file: str):
    with recorded() as read:
        PROGRAMS[file]()
    assert file in {path.stem for path, _ in read}, "the program reaches its file"
    assert not (bad := unmarked(read)), said(bad)


def test_per_rank_code_that_dynamo_reads_is_marked():
    with simulated(i=2) as mesh, recorded() as read:
        mapped = sf.shard_map(exchanged, mesh, P("i"), P("i"))
        inner = sf.shard(loss, mesh, (P(), P("i")), P(), implicit_comm="warn")
        pinned = lambda w, x: sf.constrain(mapped(x), P("i")).sum() + inner(w, x)
        sf.jit(sf.grad(pinned)).trace(W, X)
    files = {path.stem for path, _ in read}
    assert {
        "_shard",
        "_constrain",
        "_shard_map",
        "_collectives",
        "_scatter",
        "_axis_names",
    } <= files
    assert not (bad := unmarked(read)), said(bad)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("'''Title.\n\nDynamo reads this.\n'''\ndef f(): ...", "f", True),
        ("@_compat.read_by_dynamo\ndef f(): ...", "f", True),
        ("@_compat.read_by_dynamo\ndef f(): ...", "f.<locals>.<listcomp>", True),
        ("class A:\n    @_compat.read_by_dynamo\n    def f(self): ...", "A.f", True),
        ("@_compat.read_by_dynamo\ndef f(): ...", "fg", False),
        ("@_compat.constant_in_graph\ndef f(): ...", "f", False),
    ],
)
def test_a_mark_is_found(text: str, name: str, expected: bool):
    assert marked(text)(name) is expected
