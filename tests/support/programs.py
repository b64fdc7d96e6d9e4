"""Random small programs, as text: an op a line, with placements for the inputs and a mesh to
run on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from effort import EFFORT
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

import shardfn as sf
from shardfn.mesh import all_coordinates, axes_of
from shardfn.placement import marks_of
from shardfn.runtime.layouts import cut

Shape = tuple[int, ...]
SHARES = {  # what rank k of n holds of a pending value
    "sum": lambda x, k, n: x * (-1.0, 2.0, 0.0)[min(k, 2)] if n > 1 else x,
    "avg": lambda x, k, n: x * (-n, 2 * n, 0)[min(k, 2)] if n > 1 else x,
    "max": lambda x, k, n: x - k,
    "min": lambda x, k, n: x + k,
}
MESHES: tuple[dict[str, int], ...] = ({"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3})
if EFFORT > 1:
    MESHES = (*MESHES, {"a": 4}, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 2})
UNARY = (
    "torch.relu({})",
    "torch.tanh({})",
    "-{}",
    "{}.sin()",
    "{} * 0.5",
    "{} + 1",
    "F.gelu({})",
    "torch.sigmoid({})",
    "{}.double()",
)
CHOICES = (
    "torch.where({0} > {1}, {0}, {1})",
    "torch.where({0} > 0, {1}, {0} * 2)",
    "torch.maximum({}, {})",
)
BINARY = ("{} + {}", "{} - {}", "{} * {}", *CHOICES)
REDUCE = (
    "{}.sum({}, keepdim={})",
    "{}.mean({}, keepdim={})",
    "{}.amax({}, keepdim={})",
    "{}.amin({}, keepdim={})",
    "{}.var({}, keepdim={}, correction=0)",
    "{}.logsumexp({}, keepdim={})",
    "{}.max({}, keepdim={})[0]",
    "{}.prod({}, keepdim={})",
)
SMOOTH = (  # of {x} along dim {d} of size {n}; the shape stays
    "torch.fft.irfft(torch.fft.rfft({x}, dim={d}) * 2j, n={n}, dim={d})",
    "torch.fft.fft({x}, dim={d}).imag",
    "{x}.logcumsumexp({d})",
    "{x} / (1 + {x}.norm(3, {d}, keepdim=True))",
    "{x}.cummax({d})[0]",
    "{x} * ({x} > 0).any({d}, keepdim=True)",
    "{x} * ({x} > -9).all({d}, keepdim=True)",
    "{x}.masked_fill({x} > 0.5, 0.25)",
    "torch.lerp({x}, {x}.flip({d}), 0.25)",
    "{x} - {x}.kthvalue(1, {d}, keepdim=True)[0]",
    "{x} - {x}.contiguous().median({d}, keepdim=True)[0]",
    # where all are equal, rounding decides its gradient
    "{x} - torch.cat([{x}, {x} + 1], {d}).std({d}, keepdim=True, correction=0)",
    "F.normalize({x}, dim={d})",
    "{x}.nan_to_num() + torch.cumulative_trapezoid({x}, dim={d}).sum({d}, keepdim=True)",
    "{x} + {x}.mT.diagonal(dim1=-2, dim2=-1).sum() if {x}.dim() > 1 else {x}",
    "{x}.tril() if {x}.dim() > 1 else {x}",
    (
        "torch.linalg.solve({x} @ {x}.mT + 3 * torch.eye({x}.shape[-2], dtype={x}.dtype), "
        "{x}) if {x}.dim() > 1 else {x}"
    ),
    "torch.linalg.qr({x} + 0.1)[0].sum() * {x} if {x}.dim() > 2 else {x}",
    "{x}.scatter_reduce({d}, torch.zeros_like({x}, dtype=torch.long), {x}, 'sum')",
    "{x}.unfold({d}, 1, 1).squeeze(-1)",
    "{x}.tile(2).narrow(-1, 0, {x}.shape[-1])",
    "{x}.diff(dim={d}, prepend={x}.select({d}, 0).unsqueeze({d}))",
    "torch.einsum('...i,...i->...i', {x}, {x})",
)
MADE = (  # of the shape {s} and the dtype of {x}: made where it is read
    "torch.ones_like({x})",
    "torch.full({s}, 0.5, dtype={x}.dtype)",
    "torch.arange({n}, dtype={x}.dtype).div({n}).reshape({along}).expand({s})",
    "torch.linspace(-1, 1, {n}, dtype={x}.dtype).reshape({along}).expand({s}).cos()",
    "(torch.arange({n}) % 3 == 1).to({x}.dtype).reshape({along}).expand({s})",
    "F.one_hot(torch.arange({n}) // 2, {n}).sum(0).to({x}.dtype).reshape({along}).expand({s})",
)
POSITIONS = (  # of {x} along dim {d} of size {n}, read by position; the shape stays
    "{x}.masked_fill(torch.arange({n}).reshape({along}) > {n} // 2, -1.0)",
    "{x} * torch.arange(1, {n} + 1).reshape({along})",
    "torch.where(torch.arange({n}).reshape({along}) % 2 == 0, {x}, {x}.flip({d}))",
    "{x}.take_along_dim({x}.argsort(dim={d}, stable=True).flip({d}), {d})",
    "{x} - {x}.topk(1, {d})[0]",
    "{x} * F.one_hot({x}.argmax({d}), {n}).movedim(-1, {d})",
    "{x}.repeat_interleave(2, {d}).narrow({d}, {n} // 2, {n})",
    "{x}.scatter({d}, {x}.argmin({d}, keepdim=True), 0.5)",
    "{x}.index_copy({d}, torch.arange({n} - 1, -1, -1), {x} * 2)",
    "{x}.index_fill({d}, torch.tensor([{n} // 2]), 0.25)",
    "{x} + F.pad({x}.narrow({d}, 0, {n} - 1).movedim({d}, -1), (1, 0)).movedim(-1, {d})",
    "{x}.narrow({d}, {n} // 2, {n} - {n} // 2).sum({d}, keepdim=True) * {x}",
)
WINDOWS = (  # of {x} along its last dim; the size stays
    "F.conv1d({x}, {w}, padding=1)",
    "F.conv1d({x}, {w}, padding=2, dilation=2)",
    "F.conv1d({x}, {w}.flip(-1), padding='same')",
    "F.conv_transpose1d({x}, {w}.transpose(0, 1), padding=1)",
    "F.conv1d(F.pad({x}, (1, 1), value=0.5), {w})",
    "F.conv1d(F.pad({x}, (2, 0)), {w})",
)
POOLS = (
    "F.max_pool1d({x}, 3, 1, 1)",
    "F.avg_pool1d({x}, 3, 1, 1)",
    "F.avg_pool1d({x} + 1, 3, 1, 1, count_include_pad=False)",
    "F.unfold({x}[:, :, None], (1, 3), padding=(0, 1)).reshape({x}.shape[0], -1, 3, {n}).sum(2)",
    "F.interpolate({x}, scale_factor=2, mode='nearest')[..., ::2]",
    "F.interpolate({x}, size={n} + 1, mode='linear')[..., 1:]",
    "F.max_pool1d({x}, 2, 1, 0, ceil_mode=True).mean(-1, keepdim=True) * {x} if {n} > 1 else {x}",
    "F.group_norm({x}, 1)",
    "F.adaptive_avg_pool1d({x}, {n} // 2 + 1).sum(-1, keepdim=True) * {x}",
)
ALONG = (
    "{}.softmax({})",
    "{}.log_softmax({})",
    "{}.cumsum({})",
    "{}.flip({})",
    "{}.sort({})[0]",
    "{}.roll(1, {})",
    "{}.cumprod({})",
)


@attrs.frozen
class Drawn:
    """A program: inputs with shapes and placements, closed-over indices, lines, the name of its
    result.
    """

    mesh: dict[str, int]
    inputs: dict[str, tuple[Shape, Any]]
    indices: dict[str, list[int]]
    lines: tuple[str, ...]
    result: str
    out: sf.P | None

    def __repr__(self) -> str:
        said = [f"# {name}: f64{list(shape)} {spec}" for name, (shape, spec) in self.inputs.items()]
        said += [f"{name} = torch.tensor({values})" for name, values in self.indices.items()]
        return "\n".join(["", f"# mesh {self.mesh}, result placed {self.out}", *said, self.text()])

    def text(self) -> str:
        """The function's source."""
        body = [f"    {line}" for line in self.lines]
        loss = f"    return ({self.result} * {self.result}).sum(), {self.result}"
        return "\n".join([f"def program({', '.join(self.inputs)}):", *body, loss])

    def function(self) -> Any:
        """(inputs) -> (sum of squares, result)."""
        scope: dict[str, Any] = {"torch": torch, "F": F, "sf": sf, "P": sf.P, "zigzag": sf.zigzag}
        scope |= {name: torch.tensor(values) for name, values in self.indices.items()}
        exec(compile(self.text(), "<program>", "exec"), scope)
        return scope["program"]

    def arguments(self, seed: int = 0) -> list[torch.Tensor]:
        """Values for the inputs."""
        g = torch.Generator().manual_seed(seed)
        return [
            torch.randn(shape, generator=g, dtype=torch.float64)
            for shape, _ in self.inputs.values()
        ]

    def placed_arguments(self, mesh: Any) -> list[Any]:
        """The same values, those of pending inputs as what each rank of a simulated mesh holds."""
        specs = [spec for _, spec in self.inputs.values()]
        return [
            x if isinstance(spec, sf.P) else spread(x, mesh, spec)
            for x, spec in zip(self.arguments(), specs, strict=True)
        ]


def spread(x: torch.Tensor, mesh: Any, placements: list[Any]) -> Any:
    """A whole value as a DTensor, pending on the axes that say so: no two ranks of such an axis
    hold the same.
    """
    axes = axes_of(mesh)
    marks = marks_of(placements, x.shape, axes)
    held = {c: cut(x, marks, axes, c).clone() for c in all_coordinates(axes)}
    for k, (mark, n) in enumerate(zip(marks, axes.sizes, strict=True)):
        held = {
            c: SHARES[mark](value, c[k], n) if mark in SHARES else value
            for c, value in held.items()
        }
    return sf.from_local(list(held.values()), mesh, placements)


class Writer:
    """A program that is being drawn."""

    def __init__(self, draw: st.DrawFn, kinds: tuple[str, ...] = ()) -> None:
        self.draw = draw
        self.kinds = kinds or tuple(KINDS)
        self.mesh: dict[str, int] = draw(st.sampled_from(MESHES))
        self.inputs: dict[str, tuple[Shape, Any]] = {}
        self.indices: dict[str, list[int]] = {}
        self.lines: list[str] = []
        self.shapes: dict[str, Shape] = {}

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def dim(self, shape: Shape) -> int:
        return self.draw(st.integers(0, len(shape) - 1))

    def placement(self, shape: Shape) -> sf.P:
        """Each axis cuts some dim, or none. Axes on one dim are in any order that fits it; a zigzag
        is the first, and other axes divide its chunks.
        """
        parts: list[tuple[Any, ...]] = [()] * len(shape)
        for axis in self.mesh:
            dim = self.draw(st.integers(-1, len(shape) - 1))
            if dim < 0:
                continue
            ranks = self.mesh[axis]
            if any(isinstance(p, sf.zigzag) for p in parts[dim]):
                names = [p.axis if isinstance(p, sf.zigzag) else p for p in parts[dim]]
                chunks = 2 * ranks * math.prod(self.mesh[name] for name in names)
                parts[dim] = (*parts[dim], axis) if shape[dim] % chunks == 0 else parts[dim]
                continue
            if not parts[dim] and shape[dim] % (2 * ranks) == 0 and self.draw(st.booleans()):
                parts[dim] = (sf.zigzag(axis),)
                continue
            is_first = shape[dim] % ranks == 0 and self.draw(st.booleans())
            mine = parts[dim]
            parts[dim] = (axis, *mine) if is_first and len(mine) < 2 else (*mine, axis)
        return sf.P(*(p[0] if len(p) == 1 else p or None for p in parts))

    def input(self, shape: Shape) -> str:
        name = f"x{len(self.inputs)}"
        pending = self.draw(st.integers(0, 5)) == 5
        self.inputs[name], self.shapes[name] = (
            (shape, self.pending(shape) if pending else self.placement(shape)),
            shape,
        )
        return name

    def pending(self, shape: Shape) -> list[Any]:
        """Each axis cuts some dim, or none, or the value is the sum, mean or maximum of what
        its ranks hold.
        """
        kinds = self.pick(("sum", "avg"), ("sum",), ("avg",), ("max",), ("min",))
        options = [Replicate(), *map(Shard, range(len(shape))), *map(Partial, kinds * 2)]
        return [self.pick(*options) for _ in self.mesh]

    def index(self, size: int) -> tuple[str, int]:
        values = self.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
        name = f"i{len(self.indices)}"
        self.indices[name] = values
        return name, len(values)

    def other(self, shape: Shape) -> str:
        """A value that broadcasts with this shape: an old one, or a new input."""
        old = [name for name, other in self.shapes.items() if _broadcasts(other, shape)]
        if old and self.draw(st.booleans()):
            return self.pick(*old)
        drop = self.draw(st.integers(0, len(shape)))
        return self.input(tuple(self.pick(n, 1) for n in shape[drop:]))

    def write(self, text: str, shape: Shape) -> None:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.shapes[name] = shape

    def step(self) -> None:
        """One more line."""
        x = self.pick(*list(self.shapes)[-3:])
        shape = self.shapes[x]
        kinds = [
            k
            for k in self.kinds
            if (shape or k in SCALAR_KINDS) and (len(shape) < 4 or k not in GROWING)
        ]
        KINDS[self.pick(*kinds)](self, x, shape)


def _broadcasts(shape: Shape, into: Shape) -> bool:
    return len(shape) <= len(into) and all(
        a in (b, 1) for a, b in zip(shape[::-1], into[::-1], strict=False)
    )


def _unary(w: Writer, x: str, shape: Shape) -> None:
    w.write(w.pick(*UNARY).format(x), shape)


def _binary(w: Writer, x: str, shape: Shape) -> None:
    w.write(w.pick(*BINARY).format(x, w.other(shape)), shape)


def _matmul(w: Writer, x: str, shape: Shape) -> None:
    n = w.draw(st.integers(1, 5))
    old = [m for m, s in w.shapes.items() if len(s) == 2 and s[0] == shape[-1]]
    y = w.pick(*old) if old and w.draw(st.booleans()) else w.input((shape[-1], n))
    w.write(f"{x} @ {y}", (*shape[:-1], w.shapes[y][1]))


def _batched(w: Writer, x: str, shape: Shape) -> None:
    if len(shape) != 3:
        return _matmul(w, x, shape)
    w.write(f"{x} @ {x}.transpose(1, 2)", (shape[0], shape[1], shape[1]))


def _reduce(w: Writer, x: str, shape: Shape) -> None:
    dim, keep = w.dim(shape), w.draw(st.booleans())
    rest = (1,) if keep else ()
    w.write(
        w.pick(*REDUCE).format(x, w.pick(dim, dim - len(shape)), keep),
        (*shape[:dim], *rest, *shape[dim + 1 :]),
    )


def _along(w: Writer, x: str, shape: Shape) -> None:
    w.write(w.pick(*ALONG).format(x, w.dim(shape)), shape)


def _smooth(w: Writer, x: str, shape: Shape) -> None:
    d = w.dim(shape)
    w.write(w.pick(*SMOOTH).format(x=x, d=d, n=shape[d]), shape)


def _along_a_dim(w: Writer, rows: tuple[str, ...], x: str, shape: Shape) -> None:
    d = w.dim(shape)
    along = tuple(n if k == d else 1 for k, n in enumerate(shape))
    w.write(w.pick(*rows).format(x=x, d=d, n=shape[d], s=shape, along=along), shape)


def _made(w: Writer, x: str, shape: Shape) -> None:
    _along_a_dim(w, MADE, x, shape)


def _positions(w: Writer, x: str, shape: Shape) -> None:
    _along_a_dim(w, POSITIONS, x, shape)


def _transpose(w: Writer, x: str, shape: Shape) -> None:
    a, b = w.dim(shape), w.dim(shape)
    out = list(shape)
    out[a], out[b] = out[b], out[a]
    w.write(f"{x}.transpose({a}, {b})", tuple(out))


def _merge(w: Writer, x: str, shape: Shape) -> None:
    if len(shape) < 2:
        return _split(w, x, shape)
    d = w.draw(st.integers(0, len(shape) - 2))
    out = (*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :])
    w.write(f"{x}.reshape{out}", out)


def _split(w: Writer, x: str, shape: Shape) -> None:
    d = w.dim(shape)
    a = w.pick(*[k for k in range(1, shape[d] + 1) if shape[d] % k == 0])
    out = (*shape[:d], a, shape[d] // a, *shape[d + 1 :])
    w.write(f"{x}.reshape{out}", out)


def _reshape(w: Writer, x: str, shape: Shape) -> None:
    total, out = math.prod(shape), []
    for _ in range(2):
        out.append(w.pick(*[k for k in range(1, 8) if total % k == 0]))
        total //= out[-1]
    out = (*out, total)
    w.write(f"{x}.reshape{out}", out)


def _cat(w: Writer, x: str, shape: Shape) -> None:
    d = w.dim(shape)
    y = w.pick(
        *[n for n, s in w.shapes.items() if s == shape],
        w.input((*shape[:d], w.draw(st.integers(1, 3)), *shape[d + 1 :])),
    )
    w.write(f"torch.cat([{x}, {y}], {d})", (*shape[:d], shape[d] + w.shapes[y][d], *shape[d + 1 :]))


def _stack(w: Writer, x: str, shape: Shape) -> None:
    d = w.draw(st.integers(0, len(shape)))
    y = w.pick(*[n for n, s in w.shapes.items() if s == shape])
    w.write(f"torch.stack([{x}, {y}], {d})", (*shape[:d], 2, *shape[d:]))


def _slice(w: Writer, x: str, shape: Shape) -> None:
    d = w.dim(shape)
    start, step = w.draw(st.integers(0, shape[d] - 1)), w.pick(1, 1, 2)
    stop = w.draw(st.integers(start + 1, shape[d]))
    at = ", ".join([":"] * d + [f"{start}:{stop}:{step}"])
    w.write(f"{x}[{at}]", (*shape[:d], len(range(start, stop, step)), *shape[d + 1 :]))


def _select(w: Writer, x: str, shape: Shape) -> None:
    d = w.dim(shape)
    w.write(
        f"{x}.select({d}, {w.draw(st.integers(-shape[d], shape[d] - 1))})",
        (*shape[:d], *shape[d + 1 :]),
    )


def _expand(w: Writer, x: str, shape: Shape) -> None:
    d, n = w.draw(st.integers(0, len(shape))), w.draw(st.integers(1, 4))
    out = (*shape[:d], n, *shape[d:])
    w.write(f"{x}.unsqueeze({d}).expand{out}", out)


def _index(w: Writer, x: str, shape: Shape) -> None:
    d = w.dim(shape)
    name, n = w.index(shape[d])
    form = w.pick("{x}.index_select({d}, {i})", "{x}[{dots}{i}]")
    w.write(form.format(x=x, d=d, i=name, dots=":, " * d), (*shape[:d], n, *shape[d + 1 :]))


def _gather(w: Writer, x: str, shape: Shape) -> None:
    d = w.dim(shape)
    name, n = w.index(shape[d])
    spread = tuple(n if k == d else w.pick(size, size, 1) for k, size in enumerate(shape))
    own = (
        ".contiguous()" if any(spread[k] != shape[k] for k in range(len(shape)) if k != d) else ""
    )  # else the plain one is wrong
    ones = tuple(n if k == d else 1 for k in range(len(shape)))
    index = f"{name}.reshape{ones}.expand{spread}{own}"
    form = w.pick(
        "{x}.gather({d}, {i})",
        "{x}.scatter_add({d}, {i}, {x}.new_ones({n}))",
        "{x}.scatter_add({d}, {i}, {y})",
    )
    y = w.input(spread) if "{y}" in form else ""
    w.write(form.format(x=x, d=d, i=index, n=spread, y=y), spread if "gather" in form else shape)


def _embedding(w: Writer, x: str, shape: Shape) -> None:
    if len(shape) != 2:
        return _index(w, x, shape)
    name, n = w.index(shape[0])
    w.write(f"F.embedding({name}, {x})", (n, shape[1]))


def _index_put(w: Writer, x: str, shape: Shape) -> None:
    name, n = w.index(shape[0])
    y = w.input((n, *shape[1:]))
    w.write(f"{x}.index_put(({name},), {y}, accumulate=True)", shape)


def _parts(w: Writer, x: str, shape: Shape) -> None:
    d = w.dim(shape)
    n = w.draw(st.integers(1, shape[d]))
    w.write(f"{x}.split({n}, {d})[0]", (*shape[:d], n, *shape[d + 1 :]))


def _written(w: Writer, x: str, shape: Shape) -> None:
    """Writes in place to a copy."""
    d = w.dim(shape)
    k = w.draw(st.integers(0, shape[d] - 1))
    name = f"v{len(w.lines)}"
    w.write(f"{x}.clone(); {name}.select({d}, {k}).mul_(2)", shape)


def _convolution(w: Writer, x: str, shape: Shape) -> None:
    if len(shape) != 3:
        return _made(w, x, shape)
    weight = w.input((w.draw(st.integers(1, 3)), shape[1], 3))
    w.write(w.pick(*WINDOWS).format(x=x, w=weight), (shape[0], w.shapes[weight][0], shape[2]))


def _pool(w: Writer, x: str, shape: Shape) -> None:
    if len(shape) != 3:
        return _positions(w, x, shape)
    w.write(w.pick(*POOLS).format(x=x, n=shape[2]), shape)


def _attention(w: Writer, x: str, shape: Shape) -> None:
    if len(shape) != 4:
        return _along(w, x, shape)
    w.write(f"F.scaled_dot_product_attention({x}, {x}, {x})", shape)


def _pad(w: Writer, x: str, shape: Shape) -> None:
    d, before, after = (w.dim(shape), w.draw(st.integers(-1, 2)), w.draw(st.integers(-1, 2)))
    if shape[d] + before + after < 1:
        before = after = 1
    pads = [0, 0] * (len(shape) - 1 - d) + [before, after]
    w.write(f"F.pad({x}, {pads})", (*shape[:d], shape[d] + before + after, *shape[d + 1 :]))


def _norm(w: Writer, x: str, shape: Shape) -> None:
    weight = w.input((shape[-1],))
    w.write(f"F.layer_norm({x}, ({shape[-1]},), {weight}, {weight})", shape)


def _constrain(w: Writer, x: str, shape: Shape) -> None:
    w.write(f"sf.constrain({x}, {w.placement(shape)!r})", shape)


KINDS = {
    "unary": _unary,
    "binary": _binary,
    "matmul": _matmul,
    "batched": _batched,
    "reduce": _reduce,
    "along": _along,
    "transpose": _transpose,
    "merge": _merge,
    "split": _split,
    "reshape": _reshape,
    "cat": _cat,
    "stack": _stack,
    "slice": _slice,
    "select": _select,
    "expand": _expand,
    "index": _index,
    "pad": _pad,
    "norm": _norm,
    "constrain": _constrain,
    "gather": _gather,
    "embedding": _embedding,
    "index_put": _index_put,
    "parts": _parts,
    "written": _written,
    "convolution": _convolution,
    "pool": _pool,
    "made": _made,
    "positions": _positions,
    "attention": _attention,
    "smooth": _smooth,
    "smoother": _smooth,
    "smoothest": _smooth,
}
SCALAR_KINDS = {"unary", "binary", "stack", "expand", "constrain"}
GROWING = {"split", "stack", "expand"}


@st.composite
def programs(
    draw: st.DrawFn,
    most: int = 12,
    kinds: tuple[str, ...] = (),
    lengths: Sequence[int] = range(1, 8),
) -> Drawn:
    """A program of 3 to 12 lines, of these kinds, over dims of these lengths."""
    w = Writer(draw, kinds)
    dims = 3 if kinds else 1
    for _ in range(draw(st.integers(1, 2))):
        sizes = st.lists(st.sampled_from(lengths), min_size=dims, max_size=3)
        w.input(tuple(draw(sizes)))
    for _ in range(draw(st.integers(3, most))):
        w.step()
    result = list(w.shapes)[-1]
    out = w.placement(w.shapes[result]) if draw(st.booleans()) else None
    return Drawn(w.mesh, w.inputs, w.indices, tuple(w.lines), result, out)
