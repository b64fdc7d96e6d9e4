"""Patches for nn.Modules that run inside a trace: backward hooks, checkpoints, RNNs, questions
for the rank.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch._decomp import decompositions

from .compilations import caches
from .threads import replaced
from .tracing import inside_transform, is_fake, is_transformed, read_by_dynamo, twin

# Private members of torch, each by a name of ours.
parameters_of = operator.attrgetter("_parameters")
buffers_of = operator.attrgetter("_buffers")
modules_of = operator.attrgetter("_modules")
forward_hooks_of = operator.attrgetter("_forward_hooks")
forward_pre_hooks_of = operator.attrgetter("_forward_pre_hooks")
backward_hooks_of = operator.attrgetter("_backward_hooks")  # of a module or a tensor
backward_pre_hooks_of = operator.attrgetter("_backward_pre_hooks")

AFTER = "_shardfn_after"  # of a parameter: the result of its conversion

_HOOKED: contextvars.ContextVar[bool] = contextvars.ContextVar("hooked", default=False)


@contextlib.contextmanager
def hooked_by(cls: Any) -> Iterator[None]:
    """Replace torch's BackwardHook class, which fails under torch.func (2.11 to 2.15), by
    another class in this thread.

    torch's class fails under torch.func (2.11 to 2.15). Modules called by other threads still
    use it.
    """

    def choosing(torchs: Any) -> Callable[..., Any]:
        def chosen(*args: Any) -> Any:
            return cls(*args) if _HOOKED.get() else torchs(*args)

        return chosen

    token = _HOOKED.set(True)
    try:
        with replaced(torch.nn.modules.module, "BackwardHook", choosing):
            yield
    finally:
        _HOOKED.reset(token)


def rank_asked(
    asked: Callable[[str], None], answer: Callable[..., int], *args: Any, **kwargs: Any
) -> int:
    """Patch torch's functions that return the rank: report the file of the calling code to
    `asked` first.
    """
    asked(sys._getframe(2).f_code.co_filename)  # past the frame of the dispatch
    return answer(*args, **kwargs)


def checkpointed_generator(
    around: Callable[[], AbstractContextManager[Any]], *_: Any, **__: Any
) -> Iterator[None]:
    """Patch torch.utils.checkpoint without reentrance: run the function in a given context
    alone.
    """
    with around():
        yield


def checkpointed_call(
    around: Callable[[], AbstractContextManager[Any]],
    _: Any,
    fn: Callable[..., Any],
    preserve: bool,
    *args: Any,
) -> Any:
    """Patch torch.utils.checkpoint with use_reentrant=True: call the function in a given
    context.
    """
    with around():
        return fn(*args)


def dtensor_made(
    making: Callable[[], None], make: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Patch DTensor's constructors: call `making`, which may refuse, before torch's own."""
    making()
    return make(*args, **kwargs)


@contextlib.contextmanager
def nested_traces_allowed() -> Iterator[None]:
    """Allow torch.compile inside a module that this thread traces. To torch it is nested in another
    one, which does not have to compile anything if it is of a full graph.
    """
    from torch._C._dynamo.eval_frame import set_fullgraph_compiled_frame_count

    count = set_fullgraph_compiled_frame_count(0)
    try:
        with caches.settings(torch._dynamo.config, error_on_nested_fx_trace=False):
            yield
    finally:
        set_fullgraph_compiled_frame_count(count)


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Compute torch._weight_norm by ops with a forward-mode derivative and a batching rule
    (torch 2.13 has none).
    """
    dims = [d for d in range(v.dim()) if dim == -1 or d != dim % v.dim()]
    return v * (g / v.square().sum(dims, keepdim=True).sqrt())


def is_followed() -> bool:
    """Check whether torch.func is setting requires_grad itself, by its flag."""
    return torch._C._functorch.get_inplace_requires_grad_allowed()


def requires_grad_(x: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    """Tensor.requires_grad_, as of the hook that Hugging Face puts on embeddings for gradient
    checkpointing. torch.func refuses it, and its derivatives do not depend on the flag.
    """
    is_made = not isinstance(x, torch.nn.Parameter)
    if is_made and requires_grad and inside_transform() and not is_followed():
        return x
    return x.requires_grad_(requires_grad)


def of_data(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.tensor, or a function like it, that takes the tensors in a list as they are;
    torch's own reads their values.
    """

    def made(data: Any, *args: Any, **kwargs: Any) -> Any:
        take = torch._refs.tensor if _is_of_tensors(data) and not args else make
        return take(data, *args, **kwargs)

    return made


def new_tensor(x: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
    """Tensor.new_tensor, as `of_data` says."""
    if not _is_of_tensors(data):
        return x.new_tensor(data, **kwargs)
    return torch._refs.tensor(data, **{"dtype": x.dtype, "device": x.device, **kwargs})


def _is_of_tensors(data: Any) -> bool:
    """Check for a list that contains a tensor."""
    return isinstance(data, (list, tuple)) and any(map(_holds_tensor, data))


def _holds_tensor(x: Any) -> bool:
    """Check for a tensor, or a list that contains one."""
    return isinstance(x, torch.Tensor) or _is_of_tensors(x)


# Functions that a module calls and torch.func or a trace cannot handle -> equivalent code.
MODULE_OPS = {
    torch._VF._weight_norm: weight_norm,
    torch.Tensor.requires_grad_: requires_grad_,
    torch.Tensor.new_tensor: new_tensor,
    **{make: of_data(make) for make in (torch.tensor, torch.as_tensor, torch.asarray)},
}


def layer_of_lstm(choose: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Patch the choice of an LSTM layer's decomposition: the one of plain ops under a transform."""
    return decompositions.one_layer_lstm if is_transformed() else choose(*args)


def layers_of_rnn(
    run: Callable[..., Any],
    x: torch.Tensor,
    hidden: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer: Callable[..., Any],
) -> tuple[torch.Tensor, list[Any]]:
    """Patch torch's loop over the layers of an RNN: run one layer at a time, with dropout
    between them.

    Returns:
        (the sequence that the last layer returns, the hidden states of all).
    """
    if not dropout or not train:
        options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        return run(x, hidden, params, *options, layer)
    x = x.transpose(0, 1) if batch_first else x  # time first
    directions = 1 + bidirectional
    last = []
    for i in range(num_layers):
        if i:
            x = torch.dropout(x, dropout, True)
        own = slice(i * directions, (i + 1) * directions)
        options = has_biases, 1, 0.0, train, bidirectional, False
        x, states = run(x, hidden[own], params[own], *options, layer)
        last += states
    return (x.transpose(0, 1) if batch_first else x), last


PACK_ROWS, PAD_ROWS = torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence
BY_STEP = {  # of torch's ops: the steps of a padded batch, and of packed rows
    torch.lstm: (decompositions.lstm_impl, decompositions.lstm_data_impl),
    torch.gru: (decompositions.gru_impl, decompositions.gru_impl_data),
    torch.rnn_tanh: (decompositions.rnn_tanh_input, decompositions.rnn_tanh_data),
    torch.rnn_relu: (decompositions.rnn_relu_input, decompositions.rnn_relu_data),
}


def recurrent(op: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return what a module calls in place of torch.lstm, gru or rnn: the step-by-step
    decomposition under a transform, since torch cannot vmap them (2.13), and that of packed rows.
    None for another op.
    """
    if op not in BY_STEP:
        return None

    def by_step(*args: Any) -> Any:
        of_padded, of_rows = BY_STEP[op]
        if isinstance(args[3], bool):  # has_biases, where those of packed rows have parameters
            return of_padded(*args) if inside_transform() else op(*args)
        data, batch_sizes, *rest = args
        return of_rows(data, [int(n) for n in batch_sizes], *rest)

    return by_step


def rows_by_step(
    mode: str, data: torch.Tensor, counts: tuple[int, ...], hx: Any, parameters: Any, *options: Any
) -> Any:
    """Compute the packed rows of a module of this mode, step by step."""
    return BY_STEP[getattr(torch, mode.lower())][1](data, list(counts), hx, parameters, *options)


MANY = 4096  # elements of a tensor that was made from numbers
PLACES_OF_LIMIT = tuple(
    f"{module}:CONSTANT_NUMEL_LIMIT"
    for module in ("torch._subclasses.fake_tensor", "torch.fx.experimental.proxy_tensor")
)


@contextlib.contextmanager
def short_constants_known(is_mine: Callable[[], bool]) -> Iterator[None]:
    """Have torch know the values of short tensors that a module of this thread makes from numbers,
    such as lengths. By itself it knows those of one element.
    """

    class Limit(int):
        def __ge__(self, count: int) -> bool:
            return int(self) >= count or (is_mine() and count <= MANY)

    with contextlib.ExitStack() as stack:
        for place in PLACES_OF_LIMIT:
            module, _, name = place.partition(":")
            stack.enter_context(replaced(sys.modules[module], name, Limit))
        yield


def with_numbers_as_tensors(step: types.FunctionType, *args: Any, **kwargs: Any) -> Any:
    """Patch Adafactor's step, which reads numbers from tensors: run it with `max` and `min` of
    tensors.
    """
    known = {**step.__globals__, "max": _maximum, "min": _minimum}
    copied = types.FunctionType(step.__code__, known, step.__name__)
    return copied(*args, **kwargs)


BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm.forward
_BATCH_NORM = twin(BATCH_NORM)


@read_by_dynamo
def batch_norm(module: Any, input: torch.Tensor) -> torch.Tensor:
    """_BatchNorm.forward. Without a momentum torch takes the count of batches for a number; here
    the statistics are the mean over all batches by a tensor.
    """
    counts = module.training and module.track_running_stats and module.momentum is None
    if not counts or module.num_batches_tracked is None:
        return _BATCH_NORM(module, input)
    module._check_input_dim(input)
    module.num_batches_tracked.add_(1)
    share = 1 / module.num_batches_tracked.to(torch.float64)
    statistics = module.running_mean, module.running_var
    mean, variance = (torch.zeros_like(x) for x in statistics)
    out = torch.nn.functional.batch_norm(
        input, mean, variance, module.weight, module.bias, True, 1.0, module.eps
    )
    for x, new in zip(statistics, (mean, variance), strict=True):
        x.copy_(share * new + (1 - share) * x)
    return out


CAUSAL_MASK = torch.nn.modules.transformer._detect_is_causal_mask


@read_by_dynamo
def causal_mask(
    mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """_detect_is_causal_mask, which compares a mask with a causal one. Here a mask is applied as it
    is unless the caller says that it is causal: the values are the same.
    """
    return is_causal is True


ENCODER = torch.nn.TransformerEncoder.forward
_ENCODER = twin(ENCODER)


@read_by_dynamo
def encoder(
    module: Any,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    """TransformerEncoder.forward. Where torch takes nested tensors, its layers leave zeros at the
    padding that follows each sequence.
    """
    out = _ENCODER(module, src, mask, src_key_padding_mask, is_causal)
    if mask is not None or src_key_padding_mask is None or not _is_nested(module, src):
        return out
    keep = src_key_padding_mask.logical_not()
    follows = (keep == keep.to(torch.uint8).cummin(1).values).all()
    zeros = out.new_zeros(out.shape[-1])
    padding = zeros if module.norm is None else module.norm(zeros)
    return torch.where((follows & ~keep).unsqueeze(-1), padding, out)


def _is_nested(module: Any, src: torch.Tensor) -> bool:
    """Whether torch takes nested tensors for padded sequences, as it does without gradients."""
    first = module.layers[0]
    is_eager = torch.backends.mha._is_fastpath_enabled and not torch.is_autocast_enabled()
    if not is_eager or not getattr(module, "use_nested_tensor", False) or src.dim() != 3:
        return False
    tensors = src, *first.parameters()
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not first.training and not has_gradient


COUNTS_BATCHES = "a SyncBatchNorm without a momentum"
SYNCS_ON_CPU = "a SyncBatchNorm of several processes on the CPU"
SYNC_BATCH_NORM = torch.nn.SyncBatchNorm.forward
_SYNC_BATCH_NORM = twin(SYNC_BATCH_NORM)


@read_by_dynamo
def sync_batch_norm(module: Any, input: torch.Tensor) -> torch.Tensor:
    """SyncBatchNorm.forward, which in one process is the forward of a batch norm."""
    if not module.training:
        return _SYNC_BATCH_NORM(module, input)
    is_alone = not torch.distributed.is_initialized()
    if module.momentum is None and not is_alone:
        raise RuntimeError(COUNTS_BATCHES)
    if input.device.type == "cpu" and not is_alone:
        raise RuntimeError(SYNCS_ON_CPU)
    if module.momentum is not None:
        return _SYNC_BATCH_NORM(module, input)
    module._check_input_dim(input)
    module._check_non_zero_input_channels(input)
    return batch_norm(module, input)


def batch_norm_run(_: Callable[..., Any], module: Any, input: torch.Tensor) -> torch.Tensor:
    """Patch _BatchNorm.forward in a module that runs."""
    return batch_norm(module, input)


def sync_batch_norm_run(_: Callable[..., Any], module: Any, input: torch.Tensor) -> torch.Tensor:
    """Patch SyncBatchNorm.forward in a module that runs."""
    return sync_batch_norm(module, input)


def causal_mask_run(_: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Patch _detect_is_causal_mask in a module that runs."""
    return causal_mask(*args, **kwargs)


def encoder_run(_: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Patch TransformerEncoder.forward in a module that runs, whose parameters do not say whether
    they require grad.
    """
    forward = _ENCODER if torch.is_grad_enabled() else encoder
    return forward(*args, **kwargs)


def applied(original: Any, module: Any, fn: Any, recurse: bool = True) -> Any:
    """Patch Module._apply (`.to()`, `.double()`) for fake parameters: make new parameters, which
    `settle` puts in place of the old ones.
    """
    own = parameters_of(module)
    before = dict(own)
    if not any(map(is_fake, before.values())):
        return original(module, fn, recurse)
    own.clear()
    try:
        return original(module, fn, recurse)  # of its buffers, and of its children
    finally:
        own.update({name: _applied(x, fn) for name, x in before.items()})


def settle(module: torch.nn.Module) -> None:
    """Replace each parameter of a module by its latest conversion, also where submodules share
    it.
    """
    for part in module.modules():
        own = parameters_of(part)
        own.update({name: _latest(x) for name, x in own.items()})


def _applied(x: Any, fn: Any) -> Any:
    """Convert one parameter, and note the result on the old one."""
    if x is None:
        return None
    latest = _latest(x)
    with torch.no_grad():
        new = fn(latest)
    if new is latest:
        return latest
    made = torch.nn.Parameter(new, x.requires_grad)
    setattr(latest, AFTER, made)
    return made


def _latest(x: Any) -> Any:
    """Follow a parameter's conversions to the latest."""
    while (after := getattr(x, AFTER, None)) is not None:
        x = after
    return x


def _maximum(a: Any, b: Any) -> Any:
    """Return the larger of two numbers or tensors."""
    return _chosen(a, b, max, torch.maximum, "min")


def _minimum(a: Any, b: Any) -> Any:
    """Return the smaller of two numbers or tensors."""
    return _chosen(a, b, min, torch.minimum, "max")


def _chosen(
    a: Any,
    b: Any,
    of_numbers: Callable[..., Any],
    of_tensors: Callable[..., torch.Tensor],
    bound: str,
) -> Any:
    """Compute max or min of two operands, each a Python number or a tensor."""
    numbers = [x for x in (a, b) if not isinstance(x, torch.Tensor)]
    if len(numbers) == 2:
        return of_numbers(a, b)
    if not numbers:
        return of_tensors(a, b)
    x = b if a is numbers[0] else a
    return x.clamp(**{bound: numbers[0]})
