"""An optimizer of torch that is made for one step: its class, its options, its parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...errors import CaptureError, TreeError
from ...patterns import compiled

Options = Mapping[str, Any]
PURE = {"foreach": False, "fused": False, "capturable": True}  # of a group, in a graph


@attrs.frozen
class Recipe:
    """How to make an optimizer.

    Args:
        name: of the transform, for errors.
        cls: a subclass of torch.optim.Optimizer.
        options: the arguments of its constructor, besides the parameters.
        groups: for each further parameter group, a pattern of paths and its own options.
    """

    name: str
    cls: type[torch.optim.Optimizer]
    options: dict[str, Any]
    groups: tuple[tuple[str, dict[str, Any]], ...]

    @property
    def is_torchs(self) -> bool:
        """Whether torch wrote the step, and not a subclass of the user's."""
        return self.cls.step.__module__.startswith("torch.optim")

    def check_patterns(self, paths: Sequence[str]) -> None:
        """Check that each pattern fits a parameter.

        Raises:
            TreeError: lists the others.
        """
        unused = []
        for pattern, _ in self.groups:
            if not any(map(compiled(pattern).fullmatch, paths)):
                unused.append(pattern)
        if unused:
            raise TreeError.of(
                self.name,
                *(f"{pattern!r} matches no parameter" for pattern in unused),
                needed=f"paths such as {', '.join(paths[:4])}",
                fix="use a pattern of dotted paths, such as '**.bias'",
                arg_path=f"groups[{unused[0]!r}]",
            )

    def group_of(self, path: str) -> int:
        """The number of the group of a parameter: the first pattern that fits counts."""
        for i, (pattern, _) in enumerate(self.groups):
            if compiled(pattern).fullmatch(path):
                return i + 1
        return 0

    def made(self, groups: Sequence[Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
        """The optimizer over these parameters, by group.

        Raises:
            TreeError: the constructor refuses its arguments.
        """
        own = [{}, *(options for _, options in self.groups)]
        given = []
        for params, options in zip(groups, own, strict=True):
            group = {"params": list(params), **options}
            given.append(group)
        make: Callable[..., torch.optim.Optimizer] = self.cls
        try:
            return make(given, **self.options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TreeError.of(
                self.name,
                f"{self.cls.__name__} rejects its arguments: {error}",
                fix=f"pass arguments that torch.optim.{self.cls.__name__} accepts"
                if self.is_torchs
                else "pass arguments that the optimizer class accepts",
            ) from error

    def grouped(
        self, paths: Sequence[str], values: Sequence[torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """A value for each path, by parameter group; the group without a pattern is the first."""
        found: list[list[torch.Tensor]] = [[] for _ in range(len(self.groups) + 1)]
        for path, x in zip(paths, values, strict=True):
            found[self.group_of(path)].append(x)
        return found

    def over(self, paths: Sequence[str], params: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """The optimizer over these parameters, without state. It is made over tensors without
        values, so that nothing is allocated.
        """
        with _compat.neutral(), _compat.values():
            stand_ins = [_without_values(x) for x in params]
            made = self.made(self.grouped(paths, stand_ins))
        members = self.grouped(paths, params)
        for group, own in zip(made.param_groups, members, strict=True):
            group["params"] = own
        made.state.clear()
        self.check_kept(made, set(map(id, stand_ins)))
        return made

    def check_kept(self, optimizer: torch.optim.Optimizer, ids: set[int]) -> None:
        """Check that an optimizer has its parameters in its groups only: a step is of others.

        Raises:
            CaptureError: names the attributes that have some.
        """
        kept = []
        for name, x in vars(optimizer).items():
            if name not in ("param_groups", "state") and _holds(x, ids):
                kept.append(f"self.{name}")
        if kept:
            raise CaptureError.of(
                self.name,
                f"the optimizer stores parameters in {', '.join(kept)}",
                needed="a step() that reads parameters only from self.param_groups",
                fix="for group in self.param_groups: for p in group['params']: ...",
            )

    def option_names(self) -> list[str]:
        """The names of the options of a group."""
        with _compat.neutral(), _compat.values():
            x = torch.empty((2, 2), device="meta")
            made = self.made([[x], *([] for _ in self.groups)])
        return [name for name in made.param_groups[0] if name != "params"]

    def set_options(
        self,
        optimizer: torch.optim.Optimizer,
        options: Options,
        as_given: Callable[[Any], Any] = lambda x: x,
    ) -> dict[int, tuple[str, Any]]:
        """Set options of all groups. A list has one value for each group; any other value is for
        the groups without one of their own.

        Args:
            optimizer: whose groups they are.
            options: by name.
            as_given: a value as a group is given it.

        Returns:
            (the name, the value before), by the ids of the values now.
        """
        replaced: dict[int, tuple[str, Any]] = {}
        own = [{}, *(of_group for _, of_group in self.groups)]
        for name, value in options.items():
            is_list = isinstance(value, list)
            values = value if is_list else [value] * len(own)
            if len(values) != len(own):
                self._refuse_option(
                    name,
                    f"{name} is a list of {len(values)}, and there are {len(own)} groups",
                    "a value for each group: first that of parameters without a pattern",
                )
            rows = zip(optimizer.param_groups, values, own, strict=True)
            for group, x, mine in rows:
                if is_list or name not in mine:
                    self._check_option(name, x, group[name])
                    now = as_given(x)
                    before = replaced.get(id(now), (name, group[name]))[1]
                    if isinstance(now, torch.Tensor) and _is_zero(before) != _is_zero(group[name]):
                        now = now.view_as(now)  # one tensor for two options, or for two groups
                    replaced[id(now)] = name, group[name]
                    group[name] = now
        return replaced

    def _check_option(self, name: str, x: Any, before: Any) -> None:
        """Check that an option has the form of that of the constructor.

        Raises:
            TreeError: it is no number, or no tuple of as many.
        """
        if isinstance(before, tuple):
            if not isinstance(x, (tuple, list)) or len(x) != len(before):
                self._refuse_option(name, f"{name} is {x!r}", f"a tuple of {len(before)} numbers")
        elif _is_number(before) and not _is_number(x):
            self._refuse_option(name, f"{name} is {x!r}", "a number or a 0-d tensor")
        elif isinstance(x, torch.Tensor) and x.dim():
            shape = list(x.shape)
            self._refuse_option(name, f"{name} has shape {shape}", "a number or a 0-d tensor")

    def _refuse_option(self, name: str, got: str, needed: str) -> None:
        raise TreeError.of(
            f"{self.name}.update, argument {name}",
            got,
            needed=needed,
            fix=f"pass {name} in the form in which the constructor takes it",
            arg_path=name,
        )


def _is_number(x: Any) -> bool:
    """Whether Python can make a float of it, as of NumPy's numbers; or it is a dynamic size."""
    return hasattr(type(x), "__float__") or isinstance(x, (torch.SymInt, torch.SymFloat))


def _is_zero(x: Any) -> bool:
    return isinstance(x, (int, float)) and x == 0


def _holds(x: Any, ids: set[int], depth: int = 3) -> bool:
    """Whether a container, or another optimizer, has one of these tensors in it."""
    if isinstance(x, torch.optim.Optimizer):
        return _holds(x.param_groups, ids, depth)
    if not isinstance(x, (dict, list, tuple, set)) or not depth:
        return id(x) in ids
    inside = [*x, *x.values()] if isinstance(x, dict) else x
    return any(_holds(y, ids, depth - 1) for y in inside)


def _without_values(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def captured(run: Callable[[Options], Any]) -> Any:
    """Run a step with the options of a graph. A step that asserts that a `capturable` optimizer is
    on a GPU runs without this option.
    """
    try:
        return run(PURE)
    except AssertionError:
        return run({**PURE, "capturable": False})


def set_present(optimizer: torch.optim.Optimizer, options: Options) -> None:
    """Set options of all groups that have them."""
    for group in optimizer.param_groups:
        for name, x in options.items():
            if name in group:
                group[name] = x
