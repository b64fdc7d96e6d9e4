"""torch's global settings: a tuple of those that programs depend on, and contexts that fix those
of tracers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._functorch.config
import torch.fx.experimental._config

from .compilations import caches

_C = torch._C
DEVICES = ("cpu", "cuda", "xpu", "mps")  # devices whose autocast state is read
ATTENTION = "torch.nn.attention.sdpa_kernel"
REDUCED = "torch.backends.cuda.matmul.allow_..._reduced_precision_reduction"

# The user's name of each setting, and its getter (torch 2.11 to 2.15).
_COMMON = (
    ("torch.set_default_dtype", "get_default_dtype", torch),
    ("torch.autocast", "_is_any_autocast_enabled", _C),
    ("torch.device as a context, torch.set_default_device", "_len_torch_function_stack", _C),
    ("torch.use_deterministic_algorithms", "_get_deterministic_algorithms", _C),
    (
        "torch.utils.deterministic.fill_uninitialized_memory",
        "_get_deterministic_fill_uninitialized_memory",
        _C,
    ),
    (ATTENTION, "_get_flash_sdp_enabled", _C),
    ("torch.backends.mkldnn.enabled", "_get_mkldnn_enabled", _C),
)
_CUDA = (
    (ATTENTION, "_get_mem_efficient_sdp_enabled", _C),
    (ATTENTION, "_get_cudnn_sdp_enabled", _C),
    ("torch.set_float32_matmul_precision", "_get_cublas_allow_tf32", _C),
    ("torch.backends.cudnn.allow_tf32", "_get_cudnn_allow_tf32", _C),
    ("torch.backends.cudnn.enabled", "_get_cudnn_enabled", _C),
    ("torch.backends.cudnn.deterministic", "_get_cudnn_deterministic", _C),
    ("torch.backends.cudnn.benchmark", "_get_cudnn_benchmark", _C),
    (REDUCED, "_get_cublas_allow_fp16_reduced_precision_reduction", _C),
    (REDUCED, "_get_cublas_allow_bf16_reduced_precision_reduction", _C),
)
_ROWS = [
    row
    for row in (*_COMMON, *(_CUDA if torch.backends.cuda.is_built() else ()))
    if hasattr(row[2], row[1])
]
SETTINGS = tuple(row[0] for row in _ROWS)  # the entries of `settings`, in order
AUTOCAST = SETTINGS.index("torch.autocast")
MODES = 2


def _reader() -> Callable[[], tuple[Any, ...]]:
    """Compile one function that calls every getter: a loop would take twice as long."""
    names = {f"g{i}": getattr(home, name) for i, (_, name, home) in enumerate(_ROWS)}
    return eval(f"lambda: ({', '.join(f'{name}()' for name in names)},)", names)


_read = _reader()


def settings() -> tuple[Any, ...]:
    """Read the current settings as a tuple, with the devices and dtypes of autocast and the
    active modes.
    """
    now = _read()
    return _in_full(now) if now[AUTOCAST] or now[MODES] else now


def _in_full(now: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace the flags of autocast and of modes in a tuple of settings by their devices, dtypes
    and modes.
    """
    casts = tuple((d, torch.get_autocast_dtype(d)) for d in DEVICES if torch.is_autocast_enabled(d))
    modes = tuple(_mode(_C._get_function_stack_at(i)) for i in range(now[MODES]))
    full = list(now)
    full[AUTOCAST], full[MODES] = casts, modes
    return tuple(full)


def _mode(mode: Any) -> Any:
    """Return the comparison key of a torch function mode: a default-device mode's device, or the
    mode itself.
    """
    from torch.utils._device import DeviceContext

    return mode.device if type(mode) is DeviceContext else mode


def autocast_off() -> AbstractContextManager[None]:
    """Make a context in which autocast changes no op."""
    return _C._DisableAutocast()


@contextlib.contextmanager
def inference_off() -> Iterator[None]:
    """Leave inference mode, keeping the grad mode. Tensors made in inference mode have no
    version, which torch.func's levels need.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    is_grad_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
        yield


@contextlib.contextmanager
def anomaly_off() -> Iterator[None]:
    """Turn off autograd's anomaly mode, which reads the gradients of fake tensors. The mode is
    the process's: other threads are without it meanwhile.
    """
    if not torch.is_anomaly_enabled():
        yield
        return
    looks_for_nan = torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(False)
    try:
        yield
    finally:
        torch.set_anomaly_enabled(True, looks_for_nan)


def without_autocast(
    run: Callable[[list[Any]], Any], state: tuple[Any, ...]
) -> Callable[[list[Any]], Any]:
    """Wrap a runner so that autocast is off in it, if these settings have it on: the program
    already has its casts.
    """
    if not state[AUTOCAST]:
        return run

    def run_as_written(leaves: list[Any]) -> Any:
        with _C._DisableAutocast():
            return run(leaves)

    return run_as_written


def without_gradients(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Wrap a runner so that autograd does not follow it: kernels that write into given memory
    refuse inputs that require gradients.
    """

    def run_without(leaves: list[Any]) -> Any:
        if not torch.is_grad_enabled():
            return run(leaves)
        _C._set_grad_enabled(False)
        try:
            return run(leaves)
        finally:
            _C._set_grad_enabled(True)

    return run_without


@contextlib.contextmanager
def of_captures(is_dynamic: bool) -> Iterator[None]:
    """Set Dynamo's settings for a capture, in this thread (torch 2.13). With some of the user's,
    made for torch.compile, no capture is possible: graphs of subgraphs, numbers of real tensors.

    Shapes stay numbers. By default Dynamo makes symbols of them once it has traced two
    functions of different shapes. Where sizes are numbers there are no conditions on them, for
    which Dynamo would write the code of the graph.

    Args:
        is_dynamic: whether some sizes are symbols.
    """
    dynamo = caches.settings(
        torch._dynamo.config,
        replay_side_effects=False,
        side_effect_replay_policy="error",
        assume_static_by_default=True,
        automatic_dynamic_shapes=False,
        allow_rnn=True,
        do_not_emit_runtime_asserts=not is_dynamic,
        skip_fwd_side_effects_in_bwd_under_checkpoint=True,
        enable_faithful_generator_behavior=True,
        generate_pycode=False,
        track_nodes_for_deduplication=False,
        use_graph_deduplication=False,
        verify_correctness=False,
    )
    with dynamo, of_fakes():
        yield


@contextlib.contextmanager
def of_fakes() -> Iterator[None]:
    """Set torch's settings for making fake tensors and symbols: no real tensors propagate beside
    them.
    """
    real = caches.settings(torch._functorch.config, fake_tensor_propagate_real_tensors=False)
    checked = caches.settings(torch.fx.experimental._config, translation_validation=False)
    with real, checked:
        yield
