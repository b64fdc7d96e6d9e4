"""torch.func levels in Dynamo's graphs. Dynamo writes them as numbers, and a graph may be
replayed at another depth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .. import _compat

LEVEL_AT = {
    "_wrap_for_grad": 1,
    "_unwrap_for_grad": 1,
    "_add_batch_dim": 2,
    "_remove_batch_dim": 1,
}  # the position of the level argument
SAME = ("_wrap_for_grad", "_unwrap_for_grad", "_set_tensor_requires_grad")
ENTERS = ("_grad_increment_nesting", "_vmap_increment_nesting", "_jvp_increment_nesting")
LEAVES = ("_grad_decrement_nesting", "_vmap_decrement_nesting", "_jvp_decrement_nesting")
DUAL = (
    "_enter_dual_level",
    "_exit_dual_level",
)  # there is one level of dual numbers, which the first user opens


class Nesting:
    """The levels of torch.func that the replay of one graph has entered.

    Args:
        base: the number of enclosing levels when Dynamo traced it.
    """

    def __init__(self, base: int) -> None:
        self.base = base
        self.levels: list[int] = []  # the current levels
        self.duals: list[
            Any
        ] = []  # for each level of jvp, the function that closes the level of dual numbers

    @contextlib.contextmanager
    def left_on_error(self) -> Iterator[None]:
        """On an error, leave the levels that were entered inside of the context: a body that draws
        random numbers is replayed again, with a state.
        """
        with _compat.levels_left_on_error():
            try:
                yield
            except BaseException:
                while self.duals:
                    self.duals.pop()()
                self.levels.clear()
                raise

    @property
    def depth(self) -> int:
        """The current number of levels, as Dynamo counts."""
        return self.base + len(self.levels)

    def call(self, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a node at the current levels."""
        if name in DUAL:
            return 0 if name == DUAL[0] else None
        if name in LEVEL_AT:
            at = LEVEL_AT[name]
            return target(
                *args[:at], self.levels[args[at] - self.base - 1], *args[at + 1 :], **kwargs
            )
        if name in ENTERS:
            self.levels.append(target(*args, **kwargs))
            if name.startswith("_jvp"):
                self.duals.append(_compat.open_dual())
            return self.levels[-1]
        if name.startswith("_jvp"):
            self.duals.pop()()
        self.levels.pop()
        return target(*args, **kwargs)


NAMES = frozenset((*LEVEL_AT, *ENTERS, *LEAVES, *DUAL))


def dtensor_at(name: str, x: Any, rest: list[Any]) -> Any:
    """A DTensor after an op of torch.func that changes its level, as torch places it.

    Args:
        name: of the op that leads to the level.
        x: the DTensor, without values, or None where its placements are not known.
        rest: the other arguments of the op.

    Returns:
        None where the placements are not known, as of one sample of samples that are sharded.
    """
    if x is None or name in SAME:
        return x
    if name == "_add_batch_dim":
        dim = rest[0] % x.dim()
        is_sharded = any(p.is_shard(dim) for p in x.placements)
        return None if is_sharded else x.select(dim, 0)
    if name == "_remove_batch_dim":
        *_, count, dim = rest
        sizes = list(x.shape)
        sizes.insert(dim % (x.dim() + 1), count)
        return x.unsqueeze(dim).expand(sizes)
    return None
