"""The operators and their sample calls, from torch's OpInfo database, as flat functions of
tensors.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

MOST = 8  # sample calls of an operator
DTYPES = (
    torch.float64,
    torch.float32,
    torch.complex128,
    torch.int64,
    torch.bool,
)  # the first that the operator takes
SEED = 20


@attrs.frozen
class Hole:
    """Where a tensor stands in the arguments of a sample."""

    number: int


@attrs.frozen(eq=False)
class Call:
    """One sample call of an operator.

    `fn` takes the tensors and returns the list of the tensors that the operator returns. The
    tensors at `active` can be differentiated.
    """

    name: str
    number: int
    fn: Callable[..., list[torch.Tensor]]
    tensors: tuple[torch.Tensor, ...]
    active: tuple[int, ...]

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in self.tensors
        )
        return f"{self.name}#{self.number}({shapes})"


def entries() -> dict[str, Any]:
    """The database: name, with the variant's where there are several, -> entry."""
    from torch.testing._internal import common_methods_invocations as database
    from torch.testing._internal.opinfo import core

    for module in (
        database,
        core,
    ):  # it seeds random operators by state that a pure function does not see
        if hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    op_db = database.op_db
    return {
        op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op for op in op_db
    }


def dtype_of(op: Any) -> torch.dtype | None:
    """The dtype that an operator is tried in."""
    return next((d for d in DTYPES if d in op.supported_dtypes("cpu")), None)


def calls(name: str, op: Any, most: int = MOST, dtype: torch.dtype | None = None) -> Iterator[Call]:
    """Sample calls of an entry: of the function, then of the in-place variant where there is
    one; in a dtype, or in the first that the entry takes.
    """
    dtype = dtype or dtype_of(op)
    if dtype is None:
        return
    seeded()
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    samples = spread(list(op.sample_inputs("cpu", dtype, requires_grad=differentiable)), most)
    for number, sample in enumerate(samples):
        yield call(name, number, op.op, sample)
    if op.inplace_variant is not None:
        plain = [s for s in samples if isinstance(s.input, torch.Tensor) and not s.broadcasts_input]
        for number, sample in enumerate(plain[:2]):
            mine = call(
                name, len(samples) + number, functools.partial(in_place, op.inplace_variant), sample
            )
            yield (mine if op.supports_inplace_autograd else attrs.evolve(mine, active=()))


def spread(found: list[Any], most: int) -> list[Any]:
    """So many of a list, the first and the last among them: databases begin with scalars."""
    if len(found) <= most:
        return found
    return [found[i * (len(found) - 1) // max(most - 1, 1)] for i in range(most)]


def seeded() -> None:
    """Samples are the same in every run."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    try:
        import numpy as np

        np.random.seed(SEED)
    except ImportError:
        pass


def in_place(op: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """An in-place operator on a value of the function's own."""
    x = x.clone()
    op(x, *args, **kwargs)
    return x


def call(name: str, number: int, op: Callable[..., Any], sample: Any) -> Call:
    """A sample as a function of its tensors."""
    tensors: list[torch.Tensor] = []
    active: list[int] = []

    def hole(x: torch.Tensor) -> Hole:
        active.extend([len(tensors)] if x.requires_grad else [])
        tensors.append(x.detach().clone())
        return Hole(len(tensors) - 1)

    args, kwargs = pytree.tree_map_only(
        torch.Tensor, hole, ((sample.input, *sample.args), sample.kwargs)
    )
    finish, op = (
        sample.output_process_fn_grad,
        kept_pure(op, (sample.input, *sample.args), sample.kwargs),
    )

    def fn(*xs: torch.Tensor) -> list[torch.Tensor]:
        return flat(op(*filled(args, xs), **filled(kwargs, xs)))

    def processed(*xs: torch.Tensor) -> list[torch.Tensor]:
        return flat(finish(op(*filled(args, xs), **filled(kwargs, xs))))

    return Call(
        name, number, fn if _is_identity(finish) else processed, tuple(tensors), tuple(active)
    )


def kept_pure(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """The operator, on copies of its tensors if it writes to them: a sharded function leaves
    its arguments alone.
    """
    tensors = [
        x.detach() for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
    ]
    own = [x.clone() for x in tensors]
    feed = iter(own)
    own_args, own_kwargs = pytree.tree_map_only(torch.Tensor, lambda _: next(feed), (args, kwargs))
    try:
        op(*own_args, **own_kwargs)
    except Exception:
        return op  # whoever runs it says why
    pairs = [(x, y) for x, y in zip(tensors, own, strict=True) if x.layout == torch.strided]
    unwritten = all(x.isclose(y, rtol=0, atol=0, equal_nan=True).all() for x, y in pairs)
    return op if unwritten else functools.partial(on_copies, op)


def on_copies(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An operator that writes to its arguments, on values of the function's own."""
    args, kwargs = cloned((args, kwargs))
    return op(*args, **kwargs)


def cloned(tree: Any) -> Any:
    """A tree of arguments with copies of its tensors."""
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if type(tree) in (list, tuple):
        return type(tree)([cloned(t) for t in tree])
    return {k: cloned(t) for k, t in tree.items()} if type(tree) is dict else tree


def _is_identity(finish: Callable[..., Any]) -> bool:
    probe = object()
    try:
        return finish(probe) is probe
    except Exception:
        return False


def filled(tree: Any, xs: tuple[torch.Tensor, ...]) -> Any:
    """A tree with tensors for its holes."""
    if isinstance(tree, Hole):
        return xs[tree.number]
    if type(tree) in (list, tuple):
        return type(tree)([filled(t, xs) for t in tree])
    if type(tree) is dict:
        return {k: filled(t, xs) for k, t in tree.items()}
    if type(tree) is slice:
        return slice(filled(tree.start, xs), filled(tree.stop, xs), filled(tree.step, xs))
    return tree


def flat(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order; numbers become tensors."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        return [x for r in result.values() for x in flat(r)]
    if isinstance(result, (tuple, list)):
        return [x for r in result for x in flat(r)]
    return [torch.tensor(result)] if isinstance(result, (bool, int, float, complex)) else []
