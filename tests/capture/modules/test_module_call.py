"""A module inside a capture: where its ops come from, what it may use, what is refused and in
which words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from torch import Tensor, nn

import shardfn as sf
from shardfn import P

F64 = torch.float64
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(6), dtype=F64)
HERE = re.compile(re.escape(__file__) + r":\d+")
PURE = "  needed: one pure graph of tensor ops"
MASK = torch.tensor([1.0, 0.0, 2.0], dtype=F64)


def loss_of(module: nn.Module) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """(params, x) -> the sum of what the module returns."""
    fn, params, buffers = sf.functionalize(module)
    return lambda p, x: fn(p, buffers, x)[0].sum(), params


def refusal(call: Callable[[], Any], kind: type[sf.ShardError] = sf.CaptureError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return HERE.sub("HERE", str(caught.value))


class Lines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 2), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        return self.inner(y).exp()


def test_ops_and_their_backward_know_their_line_in_the_module() -> None:
    loss, params = loss_of(Lines().double())
    first = Lines.forward.__code__.co_firstlineno
    graph = sf.grad(loss).trace(params, X).program.graph.graph
    found = {
        (n.target.__name__.split(".")[0], n.meta["phase"]): n.meta["source"]
        for n in graph.nodes
        if n.op == "call_function"
    }
    line = lambda k: f"{__file__}:{first + k}"
    assert found["sin", "forward"] == line(1)
    for op, phase in (
        ("mm", "forward"),
        ("tanh", "forward"),
        ("mm", "backward"),
        ("exp", "forward"),
    ):
        assert found[op, phase] == line(2), (op, phase)


def test_placements_asked_for_inside_a_module_are_kept() -> None:
    class Pinned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sf.constrain(x * 2, P(None, "a")) + 1

    fn, params, buffers = sf.functionalize(Pinned())
    with sf.fake_world(2):
        step = sf.shard(
            lambda x: fn(params, buffers, x)[0], sf.make_mesh((2,), ("a",)), P("a"), backend="aten"
        )
        out = step(X)
        assert [c.kind for c in step.lower(X).collectives] == ["all_to_all"] and str(
            out.placements
        ) == "(Shard(dim=1),)"
        close(sf.full(out), X * 2 + 1)


def test_transforms_inside_a_module_are_part_of_it() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            energy = lambda row: self.line(row.sin()).sum()
            return sf.vmap(sf.grad(energy))(x) + sf.jvp(torch.cos, (x,), (x,))[1]

    module = Inner().double()
    loss, params = loss_of(module)
    judge = lambda p: (p["line.weight"] * X.cos() - X.sin() * X).sum()
    close(loss(params, X), judge(params))
    close(sf.grad(loss)(params, X)["line.weight"], torch.func.grad(judge)(params)["line.weight"])


def test_a_pure_function_inside_a_module_is_part_of_it() -> None:
    fn, params, buffers = sf.functionalize(nn.Linear(3, 2).double())

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fn(params, buffers, x)[0].sin()

    loss, none = loss_of(Outer())
    judge = lambda x: (x @ params["weight"].T + params["bias"]).sin().sum()
    close(sf.grad(loss, argnums=1)(none, X), torch.func.grad(judge)(X))


class Held(nn.Module):
    """Tensors that are no buffers: behind an attribute, in a closure, global, made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.w = (torch.tensor(2.0, dtype=F64), nn.Parameter(torch.ones(3, dtype=F64)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * MASK * self.w + torch.tensor([1.0, 2.0, 3.0], dtype=F64) * int(
            self.scale.item()
        )


def test_tensors_that_a_module_holds_are_read_anew_at_each_call() -> None:
    module = Held()
    fn, params, buffers = sf.functionalize(module)
    plain = lambda: (
        module(X).detach(),
        torch.func.grad(lambda p: torch.func.functional_call(module, p, X).sum())(params),
    )
    call = lambda: (fn(params, buffers, X)[0], grad(params))
    grad = sf.grad(lambda p: fn(p, buffers, X)[0].sum())
    close(call(), plain())
    MASK.mul_(2)
    try:
        close(call(), plain())
    finally:
        MASK.div_(2)


def test_functions_that_capture_writes_otherwise_are_so_in_modules() -> None:
    class Checks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cov(x.T, aweights=x[:, 0] ** 2) + nn.GaussianNLLLoss()(x, x * 2, x**2)

    loss, _ = loss_of(Checks())
    judge = lambda x: (
        torch.cov(x.T, aweights=x[:, 0] ** 2) + nn.GaussianNLLLoss()(x, x * 2, x**2)
    ).sum()
    x = X.clone().requires_grad_()
    judge(x).backward()
    close(sf.grad(loss, argnums=1)({}, X), x.grad)


class Five(torch.autograd.Function):
    """A derivative of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 5 * ctx.saved_tensors[0]


@torch.library.custom_op("test_module_call::half", mutates_args=())
def half(x: Tensor) -> Tensor:
    return x / 2


half.register_fake(torch.empty_like)
half.register_autograd(lambda ctx, g: g * 7)


def module_of(fn: Callable[[Tensor], Any]) -> nn.Module:
    class Wrapped(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return fn(x)

    return Wrapped()


def test_derivatives_of_the_users_own_count() -> None:
    loss, _ = loss_of(module_of(lambda x: Five.apply(x) + half(x)))
    close(loss({}, X), (X * 2.5).sum())
    close(sf.grad(loss, argnums=1)({}, X), 5 * X + 7)


def test_a_custom_op_without_a_derivative_is_refused_in_a_module() -> None:
    library = torch.library.Library("test_module_call_plain", "DEF")
    library.define("third(Tensor x) -> Tensor")
    for key in ("CPU", "Meta"):
        library.impl("third", lambda x: x / 3, key)
    loss, _ = loss_of(module_of(torch.ops.test_module_call_plain.third))
    close(loss({}, X), (X / 3).sum())
    fix = "define the op by torch.library.custom_op with register_autograd, or pass x.detach()"
    said = (
        "op test_module_call_plain.third.default: the op has no derivative, but is "
        f"differentiated\n  at: HERE\n  try: {fix}"
    )
    assert refusal(lambda: sf.grad(loss, argnums=1)({}, X)) == said


def test_checkpoint_inside_a_module_is_right() -> None:
    for reentrant in (True, False):
        loss, _ = loss_of(
            module_of(
                lambda x, r=reentrant: torch.utils.checkpoint.checkpoint(
                    torch.sin, x, use_reentrant=r
                )
            )
        )
        close(sf.grad(loss, argnums=1)({}, X), X.cos())


def test_dropout_is_random_in_training_and_nothing_in_eval() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        fn, params, buffers = sf.functionalize(nn.Dropout(0.5).eval())
        close(
            sf.full(sf.shard(fn, mesh, (None, None, P("a")), backend="aten")(params, buffers, X))[
                0
            ],
            X,
        )
        fn, params, buffers = sf.functionalize(nn.Dropout(0.5))
        sf.random.state.seed(4)
        sharded = sf.shard(fn, mesh, (None, None, P("a")), backend="aten")
        drawn = sf.full(sharded(params, buffers, X)[0])
        sf.random.state.seed(4)
        with sf.random.plain():
            close(drawn, nn.Dropout(0.5)(X))


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.last = self.calls + 1, x.sin()
        self.seen.append(1)
        return self.last


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros((), dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


def branches(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


HELD = (
    "the function writes in place to an argument or a closed-over tensor",
    "return a new value; in a module, use register_buffer for state that changes",
)
BUFFER = "use self.register_buffer(...) for state that changes, or return the new value"
FIXED = (
    "torch.where(mask, x, 0), x * mask, or torch.nonzero_static(x, size=n), which pads to a "
    "size that you choose"
)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "branch": (
        lambda: module_of(branches),
        (
            "functionalize(Wrapped): the function branches on a tensor's value\n  at: "
            f"HERE\n{PURE}\n  try: torch.where(condition, a, b)"
        ),
    ),
    "item": (
        lambda: module_of(lambda x: x * x.sum().item()),
        "functionalize(Wrapped): .item() reads a tensor's value while the function is "
        f"traced\n  at: HERE\n{PURE}\n"
        "  try: keep the value a tensor: no .item(), bool() or int()",
    ),
    "mask": (
        lambda: module_of(lambda x: x[x > 0]),
        (
            "functionalize(Wrapped): the shape of x[mask]'s result depends on the values of "
            f"tensors\n  at: HERE\n{PURE}\n  try: {FIXED}"
        ),
    ),
    "attributes": (
        lambda: nn.Sequential(Keeps()),
        (
            "functionalize(Sequential): the function changes an object outside of itself: 0.calls, "
            f"0.last, 0.seen\n  at: HERE\n  try: {BUFFER}"
        ),
    ),
    "no buffer": (Raw, f"functionalize(Raw): {HELD[0]}\n{PURE}\n  try: {HELD[1]}"),
    "argument": (
        lambda: module_of(lambda x: x.mul_(2)),
        "functionalize(Wrapped), argument x: the function writes to this tensor in place\n"
        "  at: HERE\n"
        "  needed: a function without side effects\n  try: return the new value, or write "
        "to a copy: x.clone()",
    ),
    "rank": (
        lambda: module_of(lambda x: x * torch.distributed.get_rank()),
        "functionalize(Wrapped): the function asks for its rank, and the captured answer "
        f"would be the same on every rank\n  at: HERE\n{PURE}\n  try: sf.axis_index(axis_name) "
        "inside shard_map; or mesh.size() for the number of ranks",
    ),
    "result": (
        lambda: module_of(lambda x: {x}),
        "functionalize(Wrapped): the module returns a set\n  needed: a tree of tensors "
        "and constants\n"
        "  try: return tensors and constants; turn your own class into a NamedTuple or a dict",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_module_that_is_no_pure_graph_is_refused_by_name(kind: str) -> None:
    make, said = REFUSED[kind]
    fn, params, buffers = sf.functionalize(make())
    assert refusal(lambda: fn(params, buffers, X)) == said


@pytest.mark.parametrize("kind", [k for k in REFUSED if k != "result"])
def test_it_is_refused_under_a_gradient_too(kind: str) -> None:
    make, said = REFUSED[kind]
    fn, params, buffers = sf.functionalize(make())
    text = refusal(lambda: sf.grad(lambda x: fn(params, buffers, x)[0].sum())(X))
    same = said.replace(
        "functionalize(Wrapped), argument x: the function writes to this tensor in place",
        f"functionalize(Wrapped): {HELD[0]}",
    )
    assert text.splitlines()[0] == same.splitlines()[0]


def test_a_refused_module_and_what_it_holds_stay_as_they_were() -> None:
    module = Raw()
    fn, params, buffers = sf.functionalize(module)
    refusal(lambda: fn(params, buffers, X))
    kept = Keeps()
    fn, params, buffers = sf.functionalize(kept)
    refusal(lambda: fn(params, buffers, X))
    assert module.count == 0 and (kept.calls, kept.seen, hasattr(kept, "last")) == (0, [0], False)


def test_names_that_do_not_fit_are_all_listed() -> None:
    fn, params, buffers = sf.functionalize(nn.BatchNorm1d(3).double())
    fix = "pass the params that functionalize returned, or a dict with the same names"
    said = (
        "functionalize(BatchNorm1d), argument params: it lacks weight\n  it has also w, v\n  "
        "at: HERE\n"
    )
    said += "  needed: the params of the module"
    wrong = {"bias": params["bias"], "w": X, "v": X}
    assert refusal(lambda: fn(wrong, buffers, X), sf.TreeError) == f"{said}\n  try: {fix}"
    assert refusal(
        lambda: sf.grad(lambda p: fn(p, {}, X)[0].sum())(params), sf.TreeError
    ).splitlines()[0] == (
        "functionalize(BatchNorm1d), argument buffers: it lacks running_mean, "
        "running_var, num_batches_tracked"
    )


def test_what_is_no_module_with_values_is_refused() -> None:
    assert refusal(lambda: sf.functionalize(torch.sin), sf.TreeError) == (
        "functionalize: a builtin_function_or_method\n  needed: an nn.Module\n  try: call "
        "functionalize(model) with the module; a function needs no functionalize"
    )
    lazy = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    names = "0.weight, 0.bias, 1.weight, 1.bias, 1.running_mean, 1.running_var"
    assert refusal(lambda: sf.functionalize(lazy), sf.TreeError) == (
        f"functionalize(Sequential): {names} have no shape yet\n  needed: parameters with "
        "values\n  try: call the module once on an example, which gives its parameters shapes"
    )
    with sf.fake_world(2):
        placed = nn.Linear(3, 2)
        weight = sf.distribute(placed.weight, sf.make_mesh((2,), ("a",)), P("a"))
        placed.weight = nn.Parameter(weight)
        assert refusal(lambda: sf.functionalize(placed), sf.TreeError) == (
            "functionalize(Linear): weight is a DTensor\n  needed: global tensors\n  try: "
            "call functionalize first, then sf.distribute(params, mesh, placements)"
        )
    with pytest.warns((DeprecationWarning, FutureWarning)):
        script = torch.jit.script(nn.Linear(3, 2))
    assert refusal(lambda: sf.functionalize(script), sf.TreeError) == (
        "functionalize(RecursiveScriptModule): a TorchScript module\n  needed: a module in "
        "Python\n  try: pass the Python module from which the TorchScript module was compiled"
    )


def test_what_is_compiled_already_is_read_as_written() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.wave = (
                torch.compile(nn.Linear(3, 2).double()),
                torch.compile(torch.sin),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.wave(self.line(x))

    loss, params = loss_of(Compiled())
    assert list(params) == ["line.weight", "line.bias"]
    judge = lambda p: (X @ p["line.weight"].T + p["line.bias"]).sin().sum()
    close(sf.grad(loss)(params, X), torch.func.grad(judge)(params))
    alone = nn.Linear(3, 2).double()
    alone.compile()
    fn, params, buffers = sf.functionalize(alone)
    close(fn(params, buffers, X)[0], X @ params["weight"].T + params["bias"])


def test_counts_of_integers_get_a_batch_of_their_own() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(5, dtype=torch.int64))
            self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))

        def forward(self, i: Tensor) -> Tensor:
            self.n.add_(nn.functional.one_hot(i, 5))
            self.seen.logical_or_(self.n > 0)
            return self.n.sum()

    fn, params, buffers = sf.functionalize(Counts())
    out, new = sf.vmap(fn, in_axes=(None, None, 0))(params, buffers, torch.tensor([3, 0]))
    eye = torch.eye(5, dtype=torch.int64)[[3, 0]]
    close((out, new["n"], new["seen"]), (torch.ones(2, dtype=torch.int64), eye, eye.bool()))


class Compilable(nn.Module):
    """Reads a value only where it is not compiled, as Hugging Face's masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        if not torch.compiler.is_compiling() and (y > 1e9).all():
            return y * 0
        return y


def test_a_module_sees_that_it_is_compiled_while_it_is_captured() -> None:
    loss, params = loss_of(Compilable())
    close(sf.jit(sf.grad(loss))(params, X)["weight"], X.sum(0))
    assert not torch.compiler.is_compiling()
    fn, params, buffers = sf.functionalize(Compilable())
    close(fn(params, buffers, X)[0], X)


class Data(nn.Module):
    """Reads .data of its argument, of a parameter and of a buffer, and writes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(MASK.clone())
        self.register_buffer("mean", torch.zeros(3, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.5).add_(x.data.mean(0))
        return (x * x.data + self.weight.data * x + self.mean.data * self.weight).sum()


def test_data_is_a_constant_of_every_derivative() -> None:
    """torch.func counts .data as the tensor in a second derivative, and refuses that of others."""
    module = Data()
    fn, params, buffers = sf.functionalize(module)
    squared = lambda w, x: fn({"weight": w}, buffers, x)[0] ** 2
    eager = lambda w, x: (
        torch.func.functional_call(Data(), {"weight": w, "mean": buffers["mean"].clone()}, x) ** 2
    )
    args = params["weight"].detach().clone(), X
    wanted = torch.autograd.functional.hessian(eager, args)
    close(sf.jit(sf.hessian(squared, (0, 1)), backend="aten")(*args), wanted)
    rows = torch.stack([X, 2 * X])
    by_row = sf.jit(sf.vmap(squared, in_axes=(None, 0)), backend="aten")(args[0], rows)
    close(by_row, torch.stack([eager(args[0], row) for row in rows]))
    out, changed = sf.jit(fn, backend="aten")(params, buffers, X)
    close(out, module(X).detach())
    close(changed["mean"], module.mean)


def test_a_compiled_full_graph_inside_a_module_is_part_of_the_capture() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2, dtype=F64)
            self.act = torch.compile(torch.sin, fullgraph=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.inner(x))

    module = Compiled()
    loss, params = loss_of(module)
    slopes = sf.jit(sf.grad(loss), backend="aten")(params, X)
    module.inner(X).sin().sum().backward()
    close(slopes["inner.weight"], module.inner.weight.grad)
    count = torch._C._dynamo.eval_frame.set_fullgraph_compiled_frame_count(-1)
    assert count < 0  # torch's count is as it was
