"""Random bad values for each parameter of each public function, and of each method of what they
return: every refusal is an error of our family, or a TypeError that names the function.

    python -m tests.faults.bad_arguments SEED COUNT
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import shardfn as sf
from shardfn import P
from tests.faults import bad_methods

X = torch.ones(4, 3)


class Odd:
    """An object that no function takes."""

    def __repr__(self) -> str:
        return "Odd()"


BAD: tuple[Any, ...] = (
    *(None, True, 0, -1, 7, 2.5, float("nan"), 1 << 70, 1j, "nope", "", b"x"),
    *((), (7,), [1], [[]], {}, {"a": 1}, {1, 2}, ("dp",), (None,), "dp"),
    *(object(), Odd(), Odd, ..., slice(1), range(3), iter([]), NotImplemented),
    *(torch.ones(2), torch.tensor(1), torch.float32, torch.device("cpu")),
    *(torch.nn.Linear(2, 2), sf.ShapeDtype((2,), torch.float32)),
    *(P("dp"), P(), P("nope"), sf.Shard(0), sf.Shard(7), sf.Replicate()),
)
# functions of one's own fail in their own words: what is passed on to them is left out
PASSED_ON = bad_methods.PASSED_ON | {("check", "args"), ("tree_map", "tree"), ("tree_map", "rest")}
FUNCTIONS = {
    "make",
    "fn",
    "f",
    "transforms",
    "true_fn",
    "false_fn",
    "cond_fun",
    "body_fun",
}  # parameters that call what they are given
# these take no argument, change the process, or run for long
LEFT_OUT = {
    *("rule", "measure_hardware", "optim"),
    *("save", "save_safetensors", "Saving"),  # would write wherever a bad path says
}


class Failure(NamedTuple):
    """A refusal in somebody else's words."""

    call: str
    error: str


def good_values(mesh: Any) -> dict[str, Any]:
    """A right value for each parameter without a default, by its name."""
    return {
        "fn": lambda x: (x * x).sum(),
        "f": lambda x, *others: (x, *others) if others else x,
        "args": X,
        "pred": torch.tensor(True),
        "true_fn": torch.sin,
        "false_fn": torch.cos,
        "operands": X,
        "cond_fun": lambda x: x.sum() < 20,
        "body_fun": lambda x: x + 1,
        "mesh": mesh,
        "placements": P("dp"),
        "axis": "dp",
        "axis_name": "dp",
        "shape": (2,),
        "axis_names": ("dp",),
        "in_placements": (P("dp"),),
        "out_placements": P(),
        "module": torch.nn.Linear(3, 3),
        "init": torch.ones(3),
        "primals": (X,),
        "tangents": (X,),
        "perm": ((0, 1), (1, 0)),
        "max_norm": 1.0,
        "path": "/no/such/folder",
        "like": {"w": X},
        "transforms": sf.grad,
        "table": [[("F", 0, 0), ("BW", 0, 0)]],
    }


def functions() -> dict[str, Callable[..., Any]]:
    """The public functions, by name."""
    values = {name: getattr(sf, name) for name in sf.__all__}
    torchs = {"Shard", "Replicate", "Partial"}
    return {
        name: x
        for name, x in values.items()
        if callable(x)
        and not (isinstance(x, type) and issubclass(x, Exception))
        and name not in torchs | LEFT_OUT
    }


def calls(
    name: str, fn: Callable[..., Any], chosen: random.Random, count: int, mesh: Any
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls of a function, each with one bad argument."""
    good = good_values(mesh) | (bad_methods.good_values(name) if "." in name else {})
    parameters = [*inspect.signature(fn).parameters.values()]
    for bad in parameters:
        if (name, bad.name) in PASSED_ON:
            continue
        values = [x for x in BAD if not (bad.name in FUNCTIONS and callable(x))]
        for value in chosen.sample(values, min(count, len(values))):
            args, kwargs = _arguments(parameters, bad, value, good)
            text = " ".join(f"{name}({bad.name}={value!r})".split())
            yield text, lambda args=args, kwargs=kwargs: called(fn, args, kwargs)


def _arguments(
    parameters: list[inspect.Parameter], bad: inspect.Parameter, value: Any, good: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = [], {}
    for p in parameters:
        if p is not bad and p.default is not p.empty:
            continue
        x = value if p is bad else good.get(p.name, X)
        is_spare = p.kind is p.VAR_POSITIONAL and p.name not in good
        if p.kind is p.VAR_KEYWORD or (is_spare and p is not bad):
            continue
        if p.kind is p.KEYWORD_ONLY or p.default is not p.empty:
            kwargs[p.name] = x
        else:
            args.append(x)
    return args, kwargs


def called(fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
    """Call a function, and the function that it returns."""
    out = fn(*args, **kwargs)
    is_ours = type(out).__module__.startswith("shardfn")
    if callable(out) and is_ours and not isinstance(out, (torch.Tensor, type)):
        out(X)


def failure_of(name: str, call: Callable[[], Any]) -> str | None:
    """The error of a call in somebody else's words. None if it has none, or has one of our
    family, a TypeError that names the function, or one of the function that was given.
    """
    try:
        call()
    except sf.ShardError:
        return None
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, TypeError) and name in words:
            return None  # Python's own: f() got an unexpected argument
        if any("raised inside" in note for note in getattr(error, "__notes__", ())):
            return None  # of the function that was given
        return " ".join(words.split())[:120]
    return None


def failures(seed: int, count: int, names: list[str] | None = None) -> tuple[int, list[Failure]]:
    """How many bad values were tried, `count` for each parameter, and the refusals in somebody
    else's words.
    """
    chosen, tried, found = random.Random(seed), 0, []
    outside = bad_methods.outside()
    with (
        sf.fake_world(2),
        warnings.catch_warnings(action="ignore"),
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),  # a bad path is one that some function can write to
    ):
        mesh = sf.make_mesh((2,), ("dp",))
        methods = bad_methods.methods([*bad_methods.objects(mesh), *outside])
        for name, fn in (functions() | methods).items():
            if names and name not in names:
                continue
            for text, call in calls(name, fn, chosen, count, mesh):
                tried += 1
                words = failure_of(name, call)
                if words is not None:
                    found.append(Failure(text, words))
    return tried, found


def main() -> None:
    """Print the failures of a seed, and how many there are of each kind."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(2**32)
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    print(f"seed {seed}, {count} values a parameter")
    _, found = failures(seed, count, sys.argv[3:])
    for row in found:
        print(f"{row.call}\n    {row.error}")
    kinds = collections.Counter(row.error.split(":")[0] for row in found)
    print(f"{len(found)} unnamed errors: {dict(kinds)}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
