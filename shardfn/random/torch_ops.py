"""torch's random ops, computed from numbers that depend on state, call and global element.

One row for each op: a function that returns what the op returns, from its arguments. Ops that
write in place follow from the rows of their functional twins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import _compat
from ..errors import ShardError, problem
from . import ambient, from_uniform
from .checks import FLOATING, check_dtype, check_interval, check_number, check_range
from .continuous import gamma as gamma_of
from .discrete import LARGEST, sample_poisson
from .from_uniform import compute_dtype

aten = torch.ops.aten
Op = Callable[..., Any]


def _unit(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Draw uniform numbers in [0, 1), shaped like x, in the dtype of the computation."""
    return ambient.draw(x.shape, dtype or compute_dtype(x.dtype), x.device)


def _normal_like(x: torch.Tensor) -> torch.Tensor:
    """Draw normally distributed numbers, shaped like x, in the dtype of the computation."""
    return from_uniform.normal(_unit(x))


def _empty(size: Any, like: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    """Return an empty tensor of the shape, dtype and device that a factory call asks for; it is
    not read.
    """
    options = {k: kwargs.get(k) for k in ("dtype", "device")}
    if like is not None:
        return like.new_empty(size, **options)
    device = options["device"] or torch.get_default_device()
    return torch.empty(size, dtype=options["dtype"], device=device)


def _refuse_generator(op: str, generator: Any) -> None:
    """Refuse a torch.Generator, whose numbers depend on the device."""
    if generator is not None:
        fix = "sf.random.state.seed(seed) before the call, or sf.random with a key"
        got = "the call has a torch.Generator, whose numbers depend on the device"
        raise ShardError(problem(f"torch.{op}", got, fix=fix), arg_path="generator", fix=fix)


def rand(size: Any, **kwargs: Any) -> torch.Tensor:
    x = _empty(size, **kwargs)
    check_dtype("torch.rand", x.dtype, FLOATING)
    return ambient.draw(x.shape, x.dtype, x.device)


def rand_like(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return rand(x.shape, like=x, **kwargs)


def randn(size: Any, **kwargs: Any) -> torch.Tensor:
    x = _empty(size, **kwargs)
    check_dtype("torch.randn", x.dtype, FLOATING)
    return _normal_like(x).to(x.dtype)


def randn_like(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return randn(x.shape, like=x, **kwargs)


def _integers(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Draw integers in [low, high), shaped like x."""
    check_range("torch.randint", low, high, x.dtype)
    number = ambient.draw(x.shape, torch.int64, x.device) & LARGEST
    return (number % (high - low) + low).to(x.dtype)


def randint(high: int, size: Any, **kwargs: Any) -> torch.Tensor:
    return randint_low(0, high, size, **kwargs)


def randint_low(low: int, high: int, size: Any, **kwargs: Any) -> torch.Tensor:
    kwargs["dtype"] = kwargs.get("dtype") or torch.int64
    return _integers(_empty(size, **kwargs), low, high)


def randint_like(x: torch.Tensor, high: int, **kwargs: Any) -> torch.Tensor:
    return randint_like_low(x, 0, high, **kwargs)


def randint_like_low(x: torch.Tensor, low: int, high: int, **kwargs: Any) -> torch.Tensor:
    return _integers(_empty(x.shape, like=x, **kwargs), low, high)


def randperm(n: int, **kwargs: Any) -> torch.Tensor:
    kwargs["dtype"] = kwargs.get("dtype") or torch.int64
    x = _empty([n], **kwargs)
    order = torch.argsort(ambient.draw([n], torch.int64, x.device), stable=True)
    return order.to(x.dtype)


def bernoulli(x: torch.Tensor, generator: Any = None) -> torch.Tensor:
    return bernoulli_p(x, x, generator=generator)


def bernoulli_p(x: torch.Tensor, p: Any = 0.5, generator: Any = None) -> torch.Tensor:
    _refuse_generator("bernoulli", generator)
    check_number("torch.bernoulli", "p", p, "a probability")
    if not isinstance(p, torch.Tensor):
        return (_unit(x, torch.float32) < p).to(x.dtype)
    drawn = (_unit(x, compute_dtype(p.dtype)) < p).to(x.dtype)
    if not x.is_floating_point():
        return drawn
    return torch.where((p >= 0) & (p <= 1), drawn, math.nan)


def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    check_number("torch.dropout", "p", p, "a probability")
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    is_kept = _unit(x, torch.float32) < 1 - p
    return x * is_kept.to(x.dtype).div(1 - p), is_kept


def uniform(
    x: torch.Tensor, low: float = 0.0, high: float = 1.0, generator: Any = None
) -> torch.Tensor:
    _refuse_generator("uniform", generator)
    check_interval("torch.Tensor.uniform_", low, high)
    return (_unit(x, x.dtype) * (high - low) + low).to(x.dtype)


def normal(
    x: torch.Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None
) -> torch.Tensor:
    _refuse_generator("normal", generator)
    check_number("torch.normal", "std", std, "a number of 0 or more")
    return (_normal_like(x) * std + mean).to(x.dtype)


def normal_of_tensors(mean: Any, std: Any = 1.0, generator: Any = None) -> torch.Tensor:
    _refuse_generator("normal", generator)
    check_number("torch.normal", "std", std, "a number of 0 or more")
    x = mean if isinstance(mean, torch.Tensor) else std
    if isinstance(mean, torch.Tensor) and isinstance(std, torch.Tensor):
        x = torch.empty(
            torch.broadcast_shapes(mean.shape, std.shape), dtype=x.dtype, device=x.device
        )
    return (_normal_like(x) * std + mean).to(x.dtype)


def normal_of_numbers(mean: float, std: float, size: Any, **kwargs: Any) -> torch.Tensor:
    _refuse_generator("normal", kwargs.pop("generator", None))
    return normal(_empty(size, **kwargs), mean, std)


@_compat.read_by_dynamo
def truncated_normal_(
    tensor: torch.Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: Any = None,
) -> torch.Tensor:
    """Fill a tensor as `torch.nn.init.trunc_normal_` does, but in one draw: torch draws again
    until all numbers fit.
    """
    _refuse_generator("nn.init.trunc_normal_", generator)
    ends = [math.erf((end - mean) / (std * math.sqrt(2))) for end in (a, b)]
    with torch.no_grad():
        u = torch.rand(tensor.shape, dtype=compute_dtype(tensor.dtype), device=tensor.device)
        value = from_uniform.truncated_normal(u, *ends) * std + mean
        return tensor.copy_(value.clamp(a, b))


def patched_initialisation() -> AbstractContextManager[None]:
    """Patch torch.nn.init to draw our numbers, where torch's random ops do."""
    replacement = truncated_normal_, ambient.is_drawing
    return _compat.patched("initialisation", truncated_normal=replacement)


def exponential(x: torch.Tensor, lambd: float = 1.0, generator: Any = None) -> torch.Tensor:
    _refuse_generator("exponential", generator)
    check_number("torch.Tensor.exponential_", "lambd", lambd, "a number above 0")
    return (from_uniform.exponential(_unit(x)) / lambd).to(x.dtype)


def cauchy(
    x: torch.Tensor, median: float = 0.0, sigma: float = 1.0, generator: Any = None
) -> torch.Tensor:
    _refuse_generator("cauchy", generator)
    check_number("torch.Tensor.cauchy_", "sigma", sigma, "a number above 0")
    return (median + sigma * torch.tan(math.pi * (_unit(x) - 0.5))).to(x.dtype)


def log_normal(
    x: torch.Tensor, mean: float = 1.0, std: float = 2.0, generator: Any = None
) -> torch.Tensor:
    _refuse_generator("log_normal", generator)
    check_number("torch.Tensor.log_normal_", "std", std, "a number above 0")
    return torch.exp(_normal_like(x) * std + mean).to(x.dtype)


def geometric(x: torch.Tensor, p: float, generator: Any = None) -> torch.Tensor:
    _refuse_generator("geometric", generator)
    check_number("torch.Tensor.geometric_", "p", p, "a probability between 0 and 1")
    return (
        torch.ceil(torch.log(from_uniform.positive(_unit(x))) / math.log1p(-p))
        .clamp_min(1)
        .to(x.dtype)
    )


def random(x: torch.Tensor, generator: Any = None) -> torch.Tensor:
    return random_from(x, 0, None, generator=generator)


def random_to(x: torch.Tensor, high: int, generator: Any = None) -> torch.Tensor:
    return random_from(x, 0, high, generator=generator)


def random_from(x: torch.Tensor, low: int, high: int | None, generator: Any = None) -> torch.Tensor:
    _refuse_generator("random_", generator)
    return _integers(x, low, _integer_end(x.dtype) if high is None else high)


def _integer_end(dtype: torch.dtype) -> int:
    """Return the end of the integers that a dtype holds exactly."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps) + 1
    return 2 if dtype == torch.bool else min(torch.iinfo(dtype).max + 1, LARGEST)


def multinomial(
    p: torch.Tensor, count: int, replacement: bool = False, generator: Any = None
) -> torch.Tensor:
    _refuse_generator("multinomial", generator)
    dim = p.dim() - 1
    shape = list(p.shape)
    if replacement or count == 1:
        size = [*shape[:-1], count, shape[-1]]
        u = ambient.draw(size, compute_dtype(p.dtype), p.device)
        return torch.argmax(from_uniform.gumbel(u) + torch.log(p).unsqueeze(dim), -1)
    u = ambient.draw(shape, compute_dtype(p.dtype), p.device)
    order = torch.argsort(from_uniform.gumbel(u) + torch.log(p), descending=True, stable=True)
    return order.narrow(dim, 0, count)


def rrelu(
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    _refuse_generator("rrelu", generator)
    check_interval("torch.rrelu", lower, upper)
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise
    slope = (_unit(x) * (upper - lower) + lower).to(x.dtype)
    slope = torch.where(x <= 0, slope, 1)
    return x * slope, slope


def rrelu_writing(x: torch.Tensor, noise: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    out, slope = rrelu(x, noise, *args, **kwargs)
    noise.copy_(slope)
    return out


def standard_gamma(a: torch.Tensor, generator: Any = None) -> torch.Tensor:
    _refuse_generator("_standard_gamma", generator)
    return gamma_of(ambient.call_key(a.device), a, dtype=a.dtype)


def poisson(rate: torch.Tensor, generator: Any = None) -> torch.Tensor:
    _refuse_generator("poisson", generator)
    return sample_poisson(ambient.call_key(rate.device), rate).to(rate.dtype)


def dirichlet(a: torch.Tensor, generator: Any = None) -> torch.Tensor:
    x = standard_gamma(a, generator)
    return x / x.sum(-1, keepdim=True)


def _refusing_generator(fn: Op) -> Op:
    """Wrap a factory so that it refuses a generator."""

    def refuse(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
        _refuse_generator(fn.__name__, generator)
        return fn(*args, **kwargs)

    return refuse


def _in_place(fn: Op) -> Op:
    """Wrap a functional op as one that writes its result into its first argument."""

    def write(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x.copy_(fn(x, *args, **kwargs))

    return write


FACTORIES: dict[Any, Op] = {
    aten.rand: rand,
    aten.randn: randn,
    aten.randperm: randperm,
    aten.randint: randint,
}
TABLE: dict[Any, Op] = {
    **{packet.default: fn for packet, fn in FACTORIES.items()},
    **{packet.generator: _refusing_generator(fn) for packet, fn in FACTORIES.items()},
    aten.randint.low: randint_low,
    aten.randint.low_generator: _refusing_generator(randint_low),
    aten.rand_like.default: rand_like,
    aten.randn_like.default: randn_like,
    aten.randint_like.default: randint_like,
    aten.randint_like.low_dtype: randint_like_low,
    aten.bernoulli.default: bernoulli,
    aten.bernoulli.p: bernoulli_p,
    aten.bernoulli.Tensor: bernoulli_p,
    aten.bernoulli_.float: _in_place(bernoulli_p),
    aten.bernoulli_.Tensor: _in_place(bernoulli_p),
    aten.native_dropout.default: native_dropout,
    aten.uniform.default: uniform,
    aten.uniform_.default: _in_place(uniform),
    aten.normal_functional.default: normal,
    aten.normal_.default: _in_place(normal),
    aten.normal.Tensor_float: normal_of_tensors,
    aten.normal.float_Tensor: normal_of_tensors,
    aten.normal.Tensor_Tensor: normal_of_tensors,
    aten.normal.float_float: normal_of_numbers,
    aten.exponential.default: exponential,
    aten.exponential_.default: _in_place(exponential),
    aten.cauchy.default: cauchy,
    aten.cauchy_.default: _in_place(cauchy),
    aten.log_normal.default: log_normal,
    aten.log_normal_.default: _in_place(log_normal),
    aten.geometric.default: geometric,
    aten.geometric_.default: _in_place(geometric),
    aten.random.default: random,
    aten.random_.default: _in_place(random),
    aten.random.to: random_to,
    aten.random_.to: _in_place(random_to),
    getattr(aten.random, "from"): random_from,
    getattr(aten.random_, "from"): _in_place(random_from),
    aten.multinomial.default: multinomial,
    aten.rrelu_with_noise_functional.default: rrelu,
    aten.rrelu_with_noise.default: rrelu_writing,
    aten.rrelu_with_noise_.default: _in_place(rrelu_writing),
    aten._standard_gamma.default: standard_gamma,
    aten._sample_dirichlet.default: dirichlet,
    aten.poisson.default: poisson,
}
