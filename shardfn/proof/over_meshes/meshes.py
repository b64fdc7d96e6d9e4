"""`meshes`: a test over many meshes, placements and sizes, with the smallest failure."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import types
import unittest
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import attrs
import torch

from ...accepted import accept, described
from ...errors import DivergenceError, ShardError
from ...mesh import make_mesh
from ...placement import P, Partial, Replicate, Shard, Stage, Zigzag, zigzag
from ...transforms import distribute, from_local
from ...world import (
    current_world,
    default_device_type,
    fake_world,
    is_launched,
    join_world,
    texts_of_ranks,
    world_set_aside,
)
from .mesh_programs import drawn_texts, program
from .mesh_spaces import Example, Space, spaces

NEARBY = 40  # examples of each smaller mesh, once a larger one has failed
FEWEST = 2  # examples of a mesh
# the names of this package in the texts of values
SF = types.SimpleNamespace(
    distribute=distribute,
    from_local=from_local,
    P=P,
    Partial=Partial,
    Replicate=Replicate,
    Shard=Shard,
    Stage=Stage,
    Zigzag=Zigzag,
    zigzag=zigzag,
)


def meshes(
    worlds: Any = "1..8",
    *,
    shapes: Mapping[str, Any] | None = None,
    placements: Any = "any",
    sizes: Mapping[str, Any] | None = None,
    axes: Sequence[str] | None = None,
    dtype: Any = torch.float64,
    below: Any = 2,
    examples: int = 50,
    seed: int = 0,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test with many numbers of ranks, on many meshes, with arguments of many sizes and
    placements.

    The test gets the generated arguments by name, as DTensors. A test with a parameter `mesh` also
    gets the mesh. Other parameters of the test may be pytest fixtures or parametrized cases.
    `meshes` reports the smallest failure that it finds, with the fewest ranks, then the fewest mesh
    axes, sharded dims and elements. The error of a failing test has a note with a program of ten
    lines that fails in the same way. Under torchrun, or inside a `fake_world`, all meshes consist
    of all ranks of the world.

    Args:
        worlds: the numbers of ranks, such as "1..8", 4 or [1, 2, 6]. For each number of ranks,
            `meshes` tries meshes of one, two and three axes. To try only one mesh, pass a dict of
            axis names and sizes as `worlds`.
        shapes: the shape of each argument, by name: a tuple of dims. A dim in `shapes` is a size, a
            name (equal names have equal sizes), a multiple of a name ("3*d"), or a range of sizes
            ("0..7"). A dict or list of shapes describes an argument that is a tree of tensors.
        placements: the placements of the arguments: one placement, a list of `P`s to choose from,
            or a dict by argument name. With `placements="any"`, `meshes` tries every way to shard
            dims over mesh axes in contiguous chunks. With `placements="all"`, `meshes` also tries
            zigzags, other orders of mesh axes, and Partial sums.
        sizes: the sizes of named dims, such as `dict(b="0..7", d=[4, 8])`. By default, on n ranks,
            a named dim has a size from 1 to max(9, 2n), but at most 16.
        axes: the names of the mesh axes; by default, the names in the placements, or "dp", "tp" and
            "cp".
        dtype: the dtype of the arguments, or a dict from names to dtypes.
        below: the exclusive upper bound of integer arguments: a size, or the name of a dim. A dict
            from argument names to bounds sets `below` for each argument.
        examples: the number of examples, at least two for each mesh. Every run of the test tries
            the same examples.
        seed: the seed of the arguments, and of torch's random numbers inside the test.

    Returns:
        A decorator. If the decorated test is called with arguments, the test runs once, with these
        arguments.

    Raises:
        ShardError: an option has a wrong value, the test has wrong parameters, hypothesis is not
            installed, or no example was tried.

    Source: hypothesis; chex's `variants`.

    Example:
        >>> import torch, shardfn as sf
        >>> @sf.meshes("1..3", shapes={"x": ("b", 2), "w": (2, "k")}, examples=6)
        ... def test_product(mesh, x, w):
        ...     y = sf.shard(lambda x, w: x @ w, mesh)(x, w)
        ...     torch.testing.assert_close(sf.full(y), sf.full(x) @ sf.full(w))
        >>> test_product()
    """
    accept("meshes", examples=examples, seed=seed)
    tried = spaces(
        worlds,
        shapes=shapes,
        placements=placements,
        sizes=sizes,
        axes=axes,
        dtype=dtype,
        below=below,
    )
    drawn = dict(shapes or {})

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        signature = _checked(test, drawn)
        mesh_name = "mesh" if "mesh" in signature.parameters and "mesh" not in drawn else None
        own = [*drawn, *filter(None, [mesh_name])]

        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            if own and all(name in kwargs for name in own):
                test(*args, **kwargs)
                return
            trial = Trial(test, drawn, mesh_name, seed, args, kwargs)
            _run(trial, tried, examples)

        rest = [p for name, p in signature.parameters.items() if name not in own]
        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return decorate


def _checked(test: Any, drawn: Mapping[str, Any]) -> inspect.Signature:
    """The signature of a test.

    Raises:
        ShardError: it is no plain function, or lacks a parameter.
    """
    name = getattr(test, "__qualname__", repr(test))
    fix = "put @sf.meshes(...) on a function: def test_step(mesh, x): ..."
    problem = None
    if isinstance(test, type) or not inspect.isroutine(test):
        problem = f"it decorates {described(test)}"
    elif inspect.iscoroutinefunction(test) or inspect.isasyncgenfunction(test):
        problem = f"{name} is async"
    elif inspect.isgeneratorfunction(test):
        problem = f"{name} yields"
    if problem:
        raise ShardError.of("meshes", problem, needed="a plain function", fix=fix)
    signature = inspect.signature(test)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    lacks = [name for name in drawn if name not in signature.parameters]
    if lacks and not takes_all:
        got = f"{name} has no parameter {', '.join(map(repr, lacks))}"
        fix = f"def {test.__name__}(mesh, {', '.join(drawn)}): ..."
        raise ShardError.of("meshes, shapes", got, fix=fix, arg_path="shapes")
    return signature


@attrs.frozen
class Trial:
    """A test with the arguments that are not drawn."""

    test: Callable[..., Any]
    drawn: dict[str, Any]
    mesh_name: str | None
    seed: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.test.__qualname__

    def run(self, example: Example) -> None:
        """Run the test once, in the world of an example."""
        __tracebackhide__ = True
        with torch.random.fork_rng(devices=[]), _world(math.prod(example.axes.sizes)):
            torch.manual_seed(self.seed)
            mesh = make_mesh(example.axes.sizes, example.axes.names)
            texts = drawn_texts(example, self.drawn)
            # the values of the text that a program prints
            scope = {"torch": torch, "sf": SF, "mesh": mesh}
            values = {name: eval(text, scope) for name, text in texts.items()}
            if self.mesh_name is not None:
                values[self.mesh_name] = mesh
            self.test(*self.args, **self.kwargs, **values)

    def program(self, example: Example) -> str:
        parameters = [*inspect.signature(self.test).parameters]
        is_method = len(self.args) > 0 and parameters[:1] == ["self"]
        rest = self.args[1:] if is_method else self.args
        names = [n for n in parameters[is_method:] if n not in self.drawn and n != self.mesh_name]
        given = {**dict(zip(names, rest, strict=False)), **self.kwargs}
        return program(
            self.test,
            example,
            self.drawn,
            mesh_name=self.mesh_name,
            seed=self.seed,
            given=given,
            is_real=_is_real(),
        )


@contextlib.contextmanager
def _world(ranks: int) -> Iterator[None]:
    """The open world, or a fake one of so many ranks."""
    if _open_world() is not None:
        yield
        return
    with world_set_aside(), fake_world(ranks):
        yield


def _open_world() -> int | None:
    """The ranks of the world that is open, or of the job. None where there is neither."""
    if is_launched():
        join_world(default_device_type())
    world = current_world()
    return None if world.kind == "real" and world.size == 1 else world.size


def _is_real() -> bool:
    world = current_world()
    return world.kind == "real" and world.size > 1


def _run(trial: Trial, tried: Sequence[Space], examples: int) -> None:
    """Run a test with examples of each mesh, and raise its smallest failure."""
    __tracebackhide__ = True
    size = _open_world()
    here = [space for space in tried if size in (None, math.prod(space.axes.sizes))]
    if not here:
        raise _skip(f"meshes: no mesh of {trial.name} fits the {size} ranks of this world")
    search = Search(trial)
    example = search.smallest(_spread(here, examples), max(FEWEST, examples // len(here)))
    if example is None:
        search.check_tried()
        return
    error = search.failures[str(example)]
    search.failures.clear()  # they hold the frames of tests
    ranks = math.prod(example.axes.sizes)
    runs = f"torchrun --nproc-per-node={ranks} program.py" if _is_real() else "python program.py"
    error.add_note(
        f"meshes: {trial.name} fails on {example}\n  the smallest of {search.failed} failures; "
        f"{search.passed} examples passed\n  these lines, saved as program.py, fail in the same "
        f"way with {runs}:"
    )
    error.add_note(trial.program(example))
    raise error.with_traceback(_of_test(error.__traceback__))


def _of_test(frames: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames of this file that lead to the test."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _spread(here: Sequence[Space], examples: int) -> list[Space]:
    """The meshes that are tried: all, or as many as there are examples for, spread evenly."""
    most = max(1, examples // FEWEST)
    if len(here) <= most:
        return [*here]
    return [here[i * len(here) // most] for i in range(most)]


def _skip(reason: str) -> BaseException:
    """The exception by which a test is left out: pytest's, or that of unittest."""
    outcomes = sys.modules.get("_pytest.outcomes")
    return unittest.SkipTest(reason) if outcomes is None else outcomes.Skipped(reason)


def _is_failure(error: BaseException) -> bool:
    """Whether an exception of a test is a failure: no skip, no rejected example, no interrupt."""
    name = type(error).__name__
    if isinstance(error, Exception):
        return name != "UnsatisfiedAssumption" and not isinstance(error, unittest.SkipTest)
    return name == "Failed"  # pytest.fail


class Search:
    """The examples of a test that were tried, and those that failed."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.failures: dict[str, BaseException] = {}
        self.kind: tuple[Any, ...] | None = None
        self.passed = self.failed = 0

    def smallest(self, meshes: Sequence[Space], examples: int) -> Example | None:
        """The smallest failing example. Meshes are tried from the smallest to the largest. Once
        one fails, smaller ones are searched near its example, since each of them has had few.
        """
        for k, space in enumerate(meshes):
            example = self.find(space, examples + 1, without=space.simplest() if k else None)
            if example is None:
                continue
            # its own mesh too, where the simplest example has not been tried
            for nearby in [*(each.near(example) for each in meshes[:k]), space]:
                other = self.find(nearby, NEARBY)
                if other is not None:
                    return other
            return example
        return None

    def find(
        self, space: Space, examples: int, *, without: Example | None = None
    ) -> Example | None:
        """A failing example of one mesh, made as small as possible. None if none was found.

        Args:
            space: the examples of the mesh.
            examples: how many are tried.
            without: the one that is not tried: hypothesis tries the simplest one of each mesh.
        """
        try:
            import hypothesis
            import hypothesis.errors
            import hypothesis.strategies as st
        except ModuleNotFoundError as error:
            got, fix = f"{error.name} is not installed", "pip install hypothesis"
            raise ShardError.of("meshes", got, fix=fix) from None

        @st.composite
        def drawn(draw: Any) -> Example:
            example = space.draw(lambda options: draw(st.sampled_from(options)))
            if example is None:
                hypothesis.reject()
            return example

        checks: Any = hypothesis.HealthCheck
        settings = hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=False,
            verbosity=hypothesis.Verbosity.quiet,
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            suppress_health_check=list(checks),
        )
        random = Random(zlib.crc32(f"{self.trial.seed} {space.axes}".encode()))
        try:
            fails = lambda x: x != without and self.fails(x)
            return hypothesis.find(drawn(), fails, settings=settings, random=random)
        except (hypothesis.errors.NoSuchExample, hypothesis.errors.Unsatisfiable):
            return None
        except hypothesis.errors.Flaky as error:
            got = f"{self.trial.name} fails once, and then passes with the same example"
            fix = "set seeds inside the test, and let no run leave state for the next one"
            raise DivergenceError.of("meshes", got, fix=fix) from error

    def fails(self, example: Example) -> bool:
        """Whether the test fails with an example, in the way in which it failed first."""
        __tracebackhide__ = True
        error = None
        try:
            self.trial.run(example)
        except BaseException as raised:
            if not _is_failure(raised):
                raise
            error = raised
        kind = None if error is None else _kind(error, self.trial.test)
        if _is_real():
            error, kind = _agreed(example, error, kind)
        if error is None:
            self.passed += 1
            return False
        self.kind = self.kind or kind
        if kind != self.kind:
            return False
        self.failed += 1
        self.failures[str(example)] = error
        return True

    def check_tried(self) -> None:
        """Check that the test has run.

        Raises:
            ShardError: it has not.
        """
        if self.passed == 0:
            got = f"no example of {self.trial.name} was run, because each one was rejected"
            needed = "sizes and placements that fit together"
            fix = (
                'sizes={"b": [4, 8]} with sizes that the placements can shard; or placements="any"'
            )
            raise ShardError.of("meshes", got, needed=needed, fix=fix)


def _kind(error: BaseException, test: Callable[..., Any]) -> tuple[Any, ...]:
    """What one failure has in common with another: its class, and the line of the test."""
    file = inspect.unwrap(test).__code__.co_filename
    lines = []
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == file:
            lines.append(frames.tb_lineno)
        frames = frames.tb_next
    return type(error).__name__, lines[-1:]


def _agreed(
    example: Example, error: BaseException | None, kind: tuple[Any, ...] | None
) -> tuple[BaseException | None, Any]:
    """The failure of the first rank that fails, on all ranks of a job.

    Raises:
        DivergenceError: the ranks have drawn different examples.
    """
    rows = [text.split("\n", 1) for text in texts_of_ranks("meshes", f"{example}\n{kind}")]
    other = next((r for r, row in enumerate(rows) if row[0] != rows[0][0]), None)
    if other is not None:
        lines = [f"rank 0: {rows[0][0]}", f"rank {other}: {rows[other][0]}"]
        fix = "run the same test with the same parameters on every rank"
        raise DivergenceError.of(
            "meshes", "the ranks have drawn different examples", *lines, fix=fix
        )
    failed = [(r, row[1]) for r, row in enumerate(rows) if row[1] != "None"]
    if not failed:
        return None, None
    rank, text = failed[0]
    if error is None:
        error = DivergenceError.of("meshes", f"rank {rank} fails, but this rank passes: {text}")
    return error, text
