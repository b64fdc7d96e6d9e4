"""What a test over meshes is tried with: for each mesh, the sizes of dims and the placements of
arguments from which an example is drawn.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import Placement, Replicate

from ...accepted import described
from ...errors import ShardError
from ...placement import P, Partial, Shard, is_spec, marks_of, names_of, torch_placements, zigzag
from ...types import MeshAxes
from ...world import MAX_RANKS

AXES = ("dp", "tp", "cp")  # the names of mesh axes, where nothing else names them
WORDS = ("any", "all")
SMALLEST_SIZES = 9  # the sizes of a dim are 1 to 9, or to twice the ranks
LARGEST_SIZES = 16
TEXT_OF_RANGE = re.compile(r"(\d+)\.\.(\d+)")
TEXT_OF_SIZE = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*)")
NEEDED_WORLDS = (
    "numbers of ranks of 1 or more, such as '1..8', 4, [1, 2, 6] or [{'dp': 2, 'tp': 3}]"
)
NEEDED_DIM = "a name, '3*name', a size, or a range of sizes such as '0..7'"

Draw = Callable[[Sequence[Any]], Any]  # draws one of several, of which the first is the simplest


@attrs.frozen
class Dim:
    """A dim of an argument: a multiple of a named size, or a number."""

    factor: int
    name: str | None = None

    def size(self, sizes: Mapping[str, int]) -> int:
        return self.factor if self.name is None else self.factor * sizes[self.name]


@attrs.frozen
class Argument:
    """A tensor that a test takes, alone or in a tree."""

    path: str
    dims: tuple[Dim, ...]
    dtype: torch.dtype
    below: Dim
    placements: tuple[Any, ...]  # those to choose from; or the words "any" or "all"

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(dim.size(sizes) for dim in self.dims)

    def codes(self, axes: MeshAxes) -> list[list[Any]]:
        """For each choice that places the argument, its options: the simplest one is the first."""
        if not isinstance(self.placements[0], str):
            return [[spec for spec in self.placements if _fits(spec, axes)]]
        dims: list[Any] = [None, *range(len(self.dims))]
        if self.placements[0] == "any":
            return [dims for _ in axes.names]
        is_summed = self.dtype.is_floating_point or self.dtype.is_complex
        partial = ["sum"] if is_summed else []
        ways = ["in order", "outermost", "zigzag"]
        return [options for _ in axes.names for options in ([*dims, *partial], ways)]

    def placement(self, code: Sequence[Any], shape: Sequence[int], axes: MeshAxes) -> Any:
        """The placement that a code stands for. None where a shape does not have it."""
        if not isinstance(self.placements[0], str):
            return code[0] if _has(shape, code[0], axes) else None
        plain = ["in order"] * len(axes.names)
        if self.placements[0] == "any":
            return _sharded(code, plain, len(shape), axes)
        spec = _sharded(code[::2], code[1::2], len(shape), axes)
        return spec if _has(shape, spec, axes) else _sharded(code[::2], plain, len(shape), axes)


def _has(shape: Sequence[int], spec: Any, axes: MeshAxes) -> bool:
    """Whether a tensor of a shape can have a placement."""
    try:
        marks_of(spec, shape, axes)
    except ValueError:
        return False
    return True


def _sharded(dims: Sequence[Any], ways: Sequence[str], ndim: int, axes: MeshAxes) -> Any:
    """A placement of the tensor dim that each mesh axis shards."""
    parts: list[list[Any]] = [[] for _ in range(ndim)]
    for name, dim, way in zip(axes.names, dims, ways, strict=True):
        if isinstance(dim, int):
            part = zigzag(name) if way == "zigzag" else name
            parts[dim].insert(0 if way == "outermost" else len(parts[dim]), part)
    while parts and not parts[-1]:
        parts.pop()
    spec = P(*(row[0] if len(row) == 1 else tuple(row) or None for row in parts))
    if "sum" not in dims:
        return spec
    rows = zip(dims, ways, strict=True)
    return [Partial() if d == "sum" else Replicate() if d is None else _of(d, w) for d, w in rows]


def _of(dim: int, way: str) -> Placement:
    (placement,) = torch_placements(((dim, 1, -2) if way == "zigzag" else dim,))
    return placement


@attrs.frozen
class Example:
    """One mesh, with the sizes of dims and a placement of each argument."""

    axes: MeshAxes
    sizes: tuple[tuple[str, int], ...]
    codes: tuple[tuple[Any, ...], ...]
    arguments: tuple[Argument, ...] = attrs.field(repr=False)

    def shape(self, argument: Argument) -> tuple[int, ...]:
        return argument.shape(dict(self.sizes))

    def placed(self) -> list[tuple[Argument, tuple[int, ...], Any]]:
        """Each argument, its shape and its placement."""
        rows = zip(self.arguments, self.codes, strict=True)
        return [
            (each, self.shape(each), each.placement(code, self.shape(each), self.axes))
            for each, code in rows
        ]

    def __str__(self) -> str:
        rows = [f"{each.path} {shape} at {spec!r}" for each, shape, spec in self.placed()]
        return ", ".join([f"mesh {self.axes}", *rows])


@attrs.frozen
class Space:
    """The examples of one mesh."""

    axes: MeshAxes
    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    arguments: tuple[Argument, ...]
    codes: tuple[tuple[tuple[Any, ...], ...], ...]

    def draw(self, draw: Draw) -> Example | None:
        """Draw an example, placements first. None if a shape does not have its placement, or an
        index has nothing to point to.
        """
        codes = [tuple(draw(options) for options in each) for each in self.codes]
        sizes = tuple((name, draw(options)) for name, options in self.sizes)
        example = Example(self.axes, sizes, tuple(codes), self.arguments)
        for argument, shape, spec in example.placed():
            if spec is None:
                return None
            is_index = not (argument.dtype.is_floating_point or argument.dtype.is_complex)
            if is_index and math.prod(shape) and argument.below.size(dict(sizes)) < 1:
                return None
        return example

    def simplest(self) -> Example | None:
        """The example with the smallest sizes, where placements are the simplest."""
        return self.draw(lambda options: options[0])

    def near(self, example: Example) -> Space:
        """The few examples of this space that resemble one of any mesh: no dim of an argument is
        sharded that was not there. A size is the same,
        the smallest, or close to the ranks that may shard it.
        """
        chosen = zip(self.codes, example.codes, strict=True)
        codes = tuple(tuple(_kept(options, code) for options in each) for each, code in chosen)
        sharded = {
            dim.name
            for argument, code in zip(self.arguments, example.codes, strict=True)
            for d, dim in enumerate(argument.dims)
            if d in code or argument.placements[0] not in WORDS
        }
        ranks = {math.prod(each) for each in _parts(self.axes.sizes)}
        close = {size for n in ranks for size in (n - 1, n, n + 1, 2 * n)}
        sizes = []
        for name, options in self.sizes:
            same = dict(example.sizes)[name]
            near = {options[0], same, *(close if name in sharded else ())}
            sizes.append((name, tuple(n for n in options if n in near)))
        return attrs.evolve(self, codes=codes, sizes=tuple(sizes))


def _parts(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All choices of some of the axes of a mesh."""
    for k in range(1, len(sizes) + 1):
        yield from itertools.combinations(sizes, k)


def _kept(options: tuple[Any, ...], code: Sequence[Any]) -> tuple[Any, ...]:
    """The options that a code has, and the simplest one."""
    return tuple(x for i, x in enumerate(options) if i == 0 or x in code)


def _fits(spec: Any, axes: MeshAxes) -> bool:
    """Whether a placement has an entry for each axis of a mesh, and names no other."""
    if isinstance(spec, P):
        return {*_axes_of(spec)} <= {*axes.names}
    return spec is None or (len(spec) if isinstance(spec, list) else 1) == len(axes.names)


def _axes_of(spec: Any) -> list[str]:
    if not isinstance(spec, P):
        return []
    return [*itertools.chain(*names_of(spec)), *spec.stages]


def spaces(
    worlds: Any,
    *,
    shapes: Any = None,
    placements: Any = "any",
    sizes: Any = None,
    axes: Any = None,
    dtype: Any = torch.float64,
    below: Any = 2,
) -> list[Space]:
    """The meshes of a test from the smallest to the largest, each with what is drawn for it.

    Raises:
        ShardError: an argument is not of its kind. Names it.
    """
    ranks, exact = _worlds(worlds)
    arguments, unnamed = _arguments(shapes, placements, dtype, below)
    names = _axis_names(axes, exact, arguments)
    _check_named(arguments, names, exact)
    allowed = _sizes(sizes, arguments, unnamed)
    meshes = [*_meshes(ranks, names, arguments), *exact]
    meshes = sorted(dict.fromkeys(meshes), key=_order)
    result = []
    for mesh in meshes:
        codes = tuple(tuple(map(tuple, each.codes(mesh))) for each in arguments)
        if all(all(each) for each in codes):
            rows = ((n, options or _default_sizes(mesh)) for n, options in allowed.items())
            result.append(Space(mesh, tuple(rows), tuple(arguments), codes))
    if not result:
        got = (
            "the lists of placements have an entry for each mesh axis, but no mesh has that many "
            "axes"
        )
        fix = "use sf.P, which names axes; or axes= with as many names as entries"
        raise ShardError.of("meshes, placements", got, fix=fix, arg_path="placements")
    return result


def _order(axes: MeshAxes) -> tuple[Any, ...]:
    return math.prod(axes.sizes), len(axes.sizes), axes.sizes, axes.names


def _default_sizes(axes: MeshAxes) -> tuple[int, ...]:
    most = min(max(SMALLEST_SIZES, 2 * math.prod(axes.sizes)), LARGEST_SIZES)
    return tuple(range(1, most + 1))


def _worlds(worlds: Any) -> tuple[list[int], list[MeshAxes]]:
    """Numbers of ranks, and meshes that are given with their axes.

    Raises:
        ShardError: something else.
    """
    rows = worlds if isinstance(worlds, (list, tuple, range)) else [worlds]
    ranks: list[int] = []
    exact = []
    for row in rows:
        if isinstance(row, Mapping) and _is_mesh(row):
            exact.append(MeshAxes(tuple(row), tuple(row.values())))
            continue
        found = _range(row)
        if not found or found[0] < 1 or found[-1] > MAX_RANKS:
            ranks = []
            break
        ranks += found
    else:
        if rows:
            return sorted({*ranks}), exact
    got, fix = f"worlds is {described(worlds)}", '@sf.meshes("1..8", shapes=...)'
    raise ShardError.of("meshes, worlds", got, needed=NEEDED_WORLDS, fix=fix, arg_path="worlds")


def _is_mesh(row: Mapping[Any, Any]) -> bool:
    sizes = [n for n in row.values() if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    names = [name for name in row if isinstance(name, str) and name.isidentifier()]
    return len(names) == len(sizes) == len(row) > 0


def _range(x: Any) -> list[int]:
    """The numbers that an int, a range or a text such as "1..8" stands for. None of them if it is
    something else.
    """
    if isinstance(x, str):
        match = TEXT_OF_RANGE.fullmatch(x.replace(" ", ""))
        return [*range(int(match[1]), int(match[2]) + 1)] if match else []
    if isinstance(x, (list, tuple, range)):
        return sorted({*x}) if all(map(_is_count, x)) else []
    return [x] if _is_count(x) else []


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _arguments(
    shapes: Any, placements: Any, dtype: Any, below: Any
) -> tuple[list[Argument], dict[str, list[int]]]:
    """The arguments of a test, and the sizes of dims that have them in place of a name."""
    if shapes is not None and not isinstance(shapes, Mapping):
        got, needed = f"shapes is {described(shapes)}", "a dict from argument names to shapes"
        fix = 'shapes={"x": ("b", "d")}'
        raise ShardError.of("meshes, shapes", got, needed=needed, fix=fix, arg_path="shapes")
    wrong: list[str] = []
    unnamed: dict[str, list[int]] = {}
    result = []
    for name, tree in (shapes or {}).items():
        choices = _of_argument("placements", placements, name, shapes, is_tree=True)
        kind = _of_argument("dtype", dtype, name, shapes)
        bound = _of_argument("below", below, name, shapes, default=2)
        for path, shape in leaves_of(tree, str(name)):
            dims = _dims(shape, path, unnamed, wrong)
            options = _placement_leaf(choices, path, len(dims))
            limit = Dim(bound) if _is_count(bound) else _named_dim(bound)
            if not isinstance(kind, torch.dtype):
                got = f"dtype of {path} is {described(kind)}"
                fix = "dtype=torch.float64, or a dict from argument names to dtypes"
                raise ShardError.of("meshes, dtype", got, fix=fix, arg_path="dtype")
            if limit is None:
                got = f"below of {path} is {described(bound)}"
                needed = "an int of 1 or more, or the name of a dim"
                fix = 'below={"ids": "vocabulary"}'
                raise ShardError.of("meshes, below", got, needed=needed, fix=fix, arg_path="below")
            result.append(Argument(path, dims, kind, limit, options))
    if wrong:
        fix = 'shapes={"x": ("b", "d"), "w": ("d", 5), "v": ("0..7",)}'
        needed = f"tuples of dims, each {NEEDED_DIM}"
        raise ShardError.of("meshes, shapes", *wrong, needed=needed, fix=fix, arg_path="shapes")
    names = {dim.name for each in result for dim in each.dims}
    for each in result:
        if each.below.name is not None and each.below.name not in names:
            got = (
                f"the argument below has {each.below.name!r} for {each.path}, but the argument "
                "shapes has no dim of this name"
            )
            fix = f"one of {', '.join(sorted(filter(None, names))) or 'the named dims'}"
            raise ShardError.of("meshes, below", got, fix=fix, arg_path="below")
    return result, unnamed


def leaves_of(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The shapes of a tree of dicts and lists, each with its path."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves_of(value, f"{path}[{key!r}]")
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from leaves_of(value, f"{path}[{i}]")
    else:
        yield path, tree


def _of_argument(
    option: str, given: Any, name: str, shapes: Any, *, is_tree: bool = False, default: Any = None
) -> Any:
    """What an option says of one argument.

    Raises:
        ShardError: it names an argument that shapes lacks, or lacks this one.
    """
    if not isinstance(given, Mapping):
        return given
    extra = [key for key in given if key not in shapes]
    if extra:
        got = f"{option} names {', '.join(map(repr, extra))}"
        needed = f"arguments of shapes: {', '.join(shapes)}"
        raise ShardError.of(f"meshes, {option}", got, needed=needed, arg_path=option)
    return given.get(name, "any" if is_tree else torch.float64 if default is None else default)


def _dims(
    shape: Any, path: str, unnamed: dict[str, list[int]], wrong: list[str]
) -> tuple[Dim, ...]:
    """The dims of a shape. Adds the sizes of those without a name, and what is wrong."""
    if not isinstance(shape, (tuple, torch.Size)):
        wrong.append(f"{path} is {described(shape)}")
        return ()
    result = []
    for i, x in enumerate(shape):
        named = _named_dim(x)
        options = _range(x)
        if named is not None:
            result.append(named)
        elif _is_count(x):
            result.append(Dim(x))
        elif options:
            unnamed[f"{path}.{i}"] = options
            result.append(Dim(1, f"{path}.{i}"))
        else:
            wrong.append(f"dim {i} of {path} is {described(x)}")
    return tuple(result)


def _named_dim(x: Any) -> Dim | None:
    match = TEXT_OF_SIZE.fullmatch(x) if isinstance(x, str) else None
    return Dim(int(match[1] or 1), match[2]) if match else None


def _placement_leaf(choices: Any, path: str, ndim: int) -> tuple[Any, ...]:
    """The placements from which that of an argument is chosen.

    Raises:
        ShardError: not a placement, or one with more dims than the argument.
    """
    if isinstance(choices, str) and choices in WORDS:
        return (choices,)
    options = [choices] if is_spec(choices) else choices
    is_sequence = isinstance(options, (list, tuple)) and len(options) > 0
    if not is_sequence or not all(map(_is_given, options)):
        got, fix = f"placements of {path} is {described(choices)}", "placements='any'"
        needed = "'any', 'all', a placement, or a list of alternative placements"
        raise ShardError.of("meshes, placements", got, needed=needed, fix=fix, arg_path=path)
    for spec in options:
        dims = len(spec.parts) if isinstance(spec, P) else 0
        rows = spec if isinstance(spec, list) else [spec]
        numbers = [p.dim for p in rows if isinstance(p, Shard)]
        dims = max([dims, *(d + 1 if d >= 0 else -d for d in numbers)])
        if dims > ndim:
            got = f"{spec} names dim {dims - 1} of {path}, but {path} has {ndim} dims"
            raise ShardError.of("meshes, placements", got, arg_path=path, placements=spec)
    return tuple(P() if spec is None else spec for spec in options)


def _is_given(spec: Any) -> bool:
    return is_spec(spec) and (spec is None or isinstance(spec, (P, Placement, list)))


def _axis_names(axes: Any, exact: list[MeshAxes], arguments: list[Argument]) -> tuple[str, ...]:
    """The names of the axes of meshes.

    Raises:
        ShardError: axes is something else.
    """
    if axes is None:
        of_specs = [n for each in arguments for spec in each.placements for n in _axes_of(spec)]
        found = dict.fromkeys([*itertools.chain(*(mesh.names for mesh in exact)), *of_specs])
        return tuple(found) or AXES
    is_sequence = isinstance(axes, (list, tuple)) and len(axes) > 0
    names = tuple(x for x in axes if isinstance(x, str) and x.isidentifier()) if is_sequence else ()
    if not names or len({*names}) != len(axes):
        got, needed = f"axes is {described(axes)}", "different names of mesh axes"
        fix = 'axes=("dp", "tp")'
        raise ShardError.of("meshes, axes", got, needed=needed, fix=fix, arg_path="axes")
    return names


def _check_named(arguments: list[Argument], names: Sequence[str], exact: list[MeshAxes]) -> None:
    """Check that each placement names axes that meshes have.

    Raises:
        ShardError: lists those that do not.
    """
    known = {*names, *itertools.chain(*(mesh.names for mesh in exact))}
    wrong = [
        f"{spec} of {each.path} names axis {name!r}"
        for each in arguments
        for spec in each.placements
        for name in _axes_of(spec)
        if name not in known
    ]
    if wrong:
        needed = f"axes of the meshes: {', '.join(sorted(known))}"
        fix = f"axes=({', '.join(map(repr, names))}, ...)"
        raise ShardError.of(
            "meshes, placements", *wrong, needed=needed, fix=fix, arg_path="placements"
        )


def _sizes(
    sizes: Any, arguments: list[Argument], unnamed: dict[str, list[int]]
) -> dict[str, tuple[int, ...]]:
    """The sizes of each named dim, ascending; none where the mesh says.

    Raises:
        ShardError: sizes is something else, or names a dim that no shape has.
    """
    names = [dim.name for each in arguments for dim in each.dims if dim.name is not None]
    result: dict[str, tuple[int, ...]] = {
        name: tuple(unnamed.get(name, ())) for name in dict.fromkeys(names)
    }
    is_mapping = sizes is None or isinstance(sizes, Mapping)
    wrong = [] if is_mapping else [f"sizes is {described(sizes)}"]
    for name, given in (sizes or {}).items() if is_mapping else ():
        options = _range(given)
        if name not in result:
            wrong.append(
                f"the argument sizes has the key {name!r}, but the argument shapes has no dim of "
                "this name"
            )
        elif not options:
            wrong.append(f"sizes of {name!r} is {described(given)}")
        else:
            result[name] = tuple(options)
    if wrong:
        needed, fix = (
            "a dict from names of dims to sizes",
            'sizes={"b": "0..7", "d": [4, 8], "k": 3}',
        )
        raise ShardError.of("meshes, sizes", *wrong, needed=needed, fix=fix, arg_path="sizes")
    return result


def _meshes(
    ranks: Sequence[int], names: Sequence[str], arguments: Sequence[Argument]
) -> Iterator[MeshAxes]:
    """The meshes of so many ranks: all shapes of one axis or more, those with axes of one rank in
    the smallest worlds. All axes that a placement names are there.
    """
    named = {name for each in arguments for spec in each.placements for name in _axes_of(spec)}
    fewest = max([0, *(names.index(name) for name in named if name in names)]) + 1
    for n in ranks:
        for k in range(fewest, len(names) + 1):
            for shape in _factorisations(n, k):
                ones = shape.count(1)
                if ones == 0 or (n <= 2 and k <= max(2, fewest)) or k == fewest:
                    yield MeshAxes(tuple(names[:k]), shape)


def _factorisations(n: int, k: int) -> Iterator[tuple[int, ...]]:
    """All tuples of k numbers whose product is n."""
    if k == 1:
        yield (n,)
        return
    for first in range(1, n + 1):
        if n % first == 0:
            for rest in _factorisations(n // first, k - 1):
                yield (first, *rest)
