"""Programs of plain torch, each with an answer that is data. Nothing here knows of shardfn."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

F64 = torch.float64
G = torch.Generator().manual_seed(5)
X = torch.randn(5, 7, generator=G, dtype=F64)
Y = torch.rand(5, 7, generator=G, dtype=F64)
W = torch.rand(7, generator=G, dtype=F64)
TARGETS = torch.tensor([[1, 2, 1], [2, 1, 3]])
LOGITS = torch.randn(6, 2, 5, generator=G, dtype=F64)
WINDOW = torch.hann_window(8, dtype=F64)
SPECTRUM = torch.stft(X.repeat(1, 4), 8, 2, window=WINDOW, return_complex=True)


@torch.library.custom_op("bystander::power", mutates_args=())
def power(x: torch.Tensor, k: float) -> torch.Tensor:
    return x**k


power.register_fake(lambda x, k: torch.empty_like(x))
power.register_autograd(
    lambda ctx, g: (g * ctx.k * ctx.saved_tensors[0] ** (ctx.k - 1), None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(inputs[0]),
        setattr(ctx, "k", inputs[1]),
    ),
)


class Doubled(torch.autograd.Function):
    """A function whose own derivative is wrong, so that it can be seen who takes it."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 7


class Tagged(torch.Tensor):
    """A class of tensors."""


def data(x: Any) -> Any:
    """A value as something that is compared exactly."""
    if isinstance(x, torch.Tensor):
        plain = x.detach().as_subclass(torch.Tensor)
        return [str(x.dtype), list(x.shape), list(x.stride()), plain.tolist()]
    if isinstance(x, (tuple, list)):
        return [data(child) for child in x]
    return x


def tried(fn: Callable[[], Any]) -> Any:
    """What a program answers: its data, or its error. Random numbers are left as they were."""
    state = torch.get_rng_state()
    try:
        return repr(data(fn()))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
    finally:
        torch.set_rng_state(state)


def compiled(
    fn: types.FunctionType, *args: Any, fullgraph: bool = False, backend: Any = None
) -> Any:
    """The graphs that Dynamo makes of a function that it has never seen, and what it returns."""
    graphs: list[Any] = []

    def noting(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op[:4] == "call"])
        return graph.forward

    code = fn.__code__.replace()
    fresh = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    run = torch.compile(fresh, backend=backend or noting, fullgraph=fullgraph)
    results = [tried(lambda x=x: run(*x)) for x in args]
    return graphs, results


COMPILED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "negative variance": (lambda x: F.gaussian_nll_loss(x, Y, Y - 0.5), (X,)),
    "gaussian_nll_loss": (lambda x: F.gaussian_nll_loss(x, Y, Y), (X,)),
    "cov": (lambda x: torch.cov(x), (X,)),
    "cov with weights of zero": (lambda x: torch.cov(x, aweights=W * 0), (X,)),
    "corrcoef": (lambda x: torch.corrcoef(x), (X,)),
    "combinations": (lambda x: torch.combinations(x, 2), (W,)),
    "istft": (lambda z: torch.istft(z, 8, 2, window=WINDOW), (SPECTRUM,)),
    "istft with gaps": (lambda z: torch.istft(z, 8, 8, window=WINDOW), (SPECTRUM,)),
    "ctc_loss": (lambda x: F.ctc_loss(x.log_softmax(-1), TARGETS, (6, 5), (3, 2)), (LOGITS,)),
    "lstsq": (lambda a: torch.linalg.lstsq(a.T, W[:, None]).solution.shape, (X,)),
    "squeeze in place": (lambda x: (x * 1).unsqueeze_(0).shape, (X,)),
    "t in place": (lambda x: (x * 1).t_().shape, (X,)),
    "autograd.Function": (lambda x: torch.func.grad(_doubled)(x), (W,)),
    "torch.func.grad": (lambda x: torch.func.grad(lambda y: y.sin().sum())(x), (W,)),
    "vmap": (lambda x: torch.vmap(torch.dot, (0, None))(x, W), (X,)),
    "a tensor of a class": (lambda x: x.as_subclass(Tagged) + 1, (W,)),
    "a tensor of a class, given": (lambda x: x + 1, (W.as_subclass(Tagged),)),
    "a custom op": (lambda x: power(x, 3.0).sum(), (W,)),
    "checkpoint": (
        lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False),
        (W,),
    ),
    "sizes that change": (lambda x: (x * 2).sum(), (X[:2, 0], X[:3, 0], X[:4, 0])),
    "is_compiling": (lambda x: (x + 1, torch.compiler.is_compiling()), (W,)),
    "a view closed over": (lambda x: x + X.T[0, 0], (W,)),
}


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(x).sum()


@contextlib.contextmanager
def fake_group() -> Iterator[None]:
    """A process group of four ranks that are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts the rank before every traceback, for good
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def in_group(fn: Callable[[], Any]) -> Callable[[], Any]:
    """A program in a process group of its own."""

    def program() -> Any:
        with fake_group():
            return tried(fn)

    return program


def _distributed() -> Any:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    x = distribute_tensor(X[:4], mesh, [Shard(0)])
    y = x.redistribute(mesh, [Replicate()])
    z = DTensor.from_local(X[:1], mesh, [Shard(0)]) * 2
    rank = (dist.get_rank(), mesh.get_rank(), mesh.get_local_rank(), mesh.get_coordinate())
    kinds = [str(t.placements) for t in (x, y)]
    return kinds, list(x.to_local().shape), list(y.shape), repr(z.shape), rank


def _compiled_in_group(fn: Callable[..., Any]) -> Callable[[], Any]:
    return in_group(lambda: compiled(fn, (W,)))


def _dtensor_inside(x: torch.Tensor) -> torch.Tensor:
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    return DTensor.from_local(x, mesh, [Shard(0)]).to_local() * 2


IN_GROUP: dict[str, Callable[[], Any]] = {
    "DTensor": in_group(_distributed),
    "DTensor, compiled": _compiled_in_group(_dtensor_inside),
    "get_rank, compiled": _compiled_in_group(lambda x: x + dist.get_rank()),
    "functional collective, compiled": _compiled_in_group(
        lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) + 1
    ),
    "collective, compiled": _compiled_in_group(lambda x: dist.all_reduce(x + 1)),
}


def _backward_hook() -> Any:
    module = nn.Linear(7, 2).double()
    with torch.no_grad():
        module.weight.fill_(0.5), module.bias.fill_(0.25)
    module.register_full_backward_hook(
        lambda m, i, o: tuple(None if g is None else g * 2 for g in i)
    )
    x = W.clone().requires_grad_()
    module(x).square().sum().backward()
    return x.grad


def _func_of_hooked() -> Any:
    module = nn.Linear(7, 2).double()
    module.register_full_backward_hook(lambda m, i, o: None)
    return torch.func.grad(lambda x: module(x).sum())(W).shape


def _checkpointed(reentrant: bool) -> Any:
    x, calls = W.clone().requires_grad_(), []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin().square()

    out = torch.utils.checkpoint.checkpoint(counted, x, use_reentrant=reentrant)
    out.sum().backward()
    return x.grad, len(calls)


def _saved_hooks() -> Any:
    seen: list[Any] = []
    pack = lambda x: (seen.append(list(x.shape)), x)[1]
    x = W.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        (x.sin() * x).sum().backward()
    return seen, x.grad


def _forward_ad() -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(W, W).sin()).tangent


def _faked(fn: Callable[..., Any]) -> Callable[[], Any]:
    """A program of fake tensors: what its result is like."""

    def program() -> Any:
        with FakeTensorMode() as mode:
            x = fn(mode.from_tensor(X))
        return (type(x).__name__, str(x.device), list(x.shape), x.stride(), str(x.dtype))

    return program


def _zero(*shape: int) -> torch.Tensor:
    return torch._efficientzerotensor(shape, dtype=F64)


def _zeros() -> Any:
    views = [_zero(6).view(2, 3), _zero(6).as_strided((2, 2), (1, 3))]
    results = [*views, _zero(7) * W, W + _zero(7), _zero(7) / W, _zero(7) - W]
    return [(x._is_zerotensor(), x + 0) for x in results]


def _traced() -> Any:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: (y.sin() * y).sum())(x)

    graph = make_fx(program)(W)
    return graph.code, [sorted(n.meta) for n in graph.graph.nodes]


def _attention() -> Any:
    torch.random.default_generator.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, batch_first=True, dtype=F64).eval()
    x = X[:4, :4].reshape(2, 2, 4).contiguous()
    called: list[str] = []
    with torch.inference_mode(), torch.autograd.profiler.profile() as profile:
        out = layer(x, x, x, need_weights=False)[0]
    called = [e.name for e in profile.function_events if "multi_head" in e.name]
    return out, sorted(set(called)), torch.backends.mha.get_fastpath_enabled()


def _exported() -> Any:
    module = nn.Linear(7, 3).double()
    return [str(n) for n in torch.export.export(module, (W,)).graph.nodes]


def _stance() -> Any:
    """A function that was compiled before is run as compiled: the graph counts its calls."""
    calls: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *xs: (calls.append(1), graph.forward(*xs))[1]

    run = torch.compile(lambda x: x.sin() + 1, backend=counting)
    return [run(W), run(W), len(calls)]


def _inductor() -> Any:
    return torch.compile(lambda x: (x.sin() * 2).sum(), backend="inductor")(W)


def _aot() -> Any:
    x = W.clone().requires_grad_()
    run = torch.compile(lambda x: (x.sin() * x).sum(), backend="aot_eager")
    run(x).backward()
    return x.grad


EAGER: dict[str, Callable[[], Any]] = {
    "grad": lambda: torch.func.grad(lambda x: (x.sin() * x).sum())(W),
    "jvp": lambda: torch.func.jvp(torch.sin, (W,), (W,)),
    "hessian": lambda: torch.func.hessian(lambda x: (x.sin() * x).sum())(W[:2]),
    "jacrev": lambda: torch.func.jacrev(torch.sin)(W[:2]),
    "vmap of grad": lambda: torch.vmap(torch.func.grad(lambda x: x.cos().sum()))(X),
    "forward AD": _forward_ad,
    "weight norm, forward": lambda: torch.func.jvp(
        lambda v: torch._weight_norm(v, X[:, :1], 0), (X,), (X,)
    ),
    "double backward": lambda: torch.autograd.functional.hessian(lambda x: (x**3).sum(), W[:2]),
    "custom op": lambda: power(W, 3.0),
    "custom op, autograd": lambda: torch.autograd.functional.vjp(lambda x: power(x, 3.0), W, W),
    "custom op, torch.func": lambda: torch.func.grad(lambda x: power(x, 3.0).sum())(W),
    "custom op packet, torch.func": lambda: torch.func.grad(
        lambda x: torch.ops.bystander.power(x, 3.0).sum()
    )(W),
    "custom op, vmap": lambda: torch.vmap(lambda x: power(x, 3.0))(X),
    "autograd.Function, torch.func": lambda: torch.func.grad(_doubled)(W),
    "backward hook": _backward_hook,
    "backward hook, torch.func": _func_of_hooked,
    "checkpoint, reentrant": lambda: _checkpointed(True),
    "checkpoint, not reentrant": lambda: _checkpointed(False),
    "checkpoint, torch.func": lambda: torch.func.grad(
        lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum()
    )(W),
    "saved tensors": _saved_hooks,
    "zeros": _zeros,
    "fake": _faked(lambda x: x @ x.T),
    "fake lstsq": _faked(lambda x: torch.linalg.lstsq(x.T, x[:1].T).solution),
    "fake ctc_loss": _faked(
        lambda x: torch._ctc_loss(x.new_ones(6, 2, 5), x.new_ones(2, 3).long(), (6, 5), (3, 2))[1]
    ),
    "fake nonzero": _faked(torch.nonzero),
    "fake zeros": _faked(lambda x: x * torch._efficientzerotensor((7,), dtype=F64)),
    "fake view of zeros": _faked(lambda x: _zero(6).view(2, 3)),
    "fake view, twice": _faked(lambda x: _zero(6).view(2, 3).view(6).view(3, 2) + 1),
    "fake item": _faked(lambda x: x.sum().item()),
    "make_fx": _traced,
    "attention": _attention,
    "gaussian_nll_loss, eager": lambda: F.gaussian_nll_loss(X, Y, Y - 0.5),
    "seeded": lambda: torch.rand(3, generator=torch.Generator().manual_seed(3)),
    "modes": lambda: (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        torch.compiler.is_compiling(),
        forward_ad._current_level,
    ),
}
COMPILING: dict[str, Callable[[], Any]] = {
    **{
        f"compiled, {name}": (lambda fn=fn, args=args: compiled(fn, *[(x,) for x in args]))
        for name, (fn, args) in COMPILED.items()
    },
    "compiled, called twice": _stance,
    "compiled, inductor": _inductor,
    "compiled, aot_eager": _aot,
    "export": _exported,
}
