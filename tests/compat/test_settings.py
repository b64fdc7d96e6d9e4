"""torch's settings as one tuple: each that changes a program changes it. Those of the tracers
change none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn._compat.settings import SETTINGS, settings, without_autocast

SYMBOLS = "torch.fx.experimental._config"
REAL = "torch._functorch.config.fake_tensor_propagate_real_tensors"
WEIGHT = torch.nn.Linear(4, 4, dtype=torch.float64)


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CHANGES: dict[str, Callable[[], AbstractContextManager]] = {
    "a default dtype": default_dtype,
    "determinism": deterministic,
    "autocast": lambda: torch.autocast("cpu"),
    "autocast to another dtype": lambda: torch.autocast("cpu", torch.float16),
    "a default device": lambda: torch.device("meta"),
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_is_another_tuple_and_the_old_one_comes_back(name: str) -> None:
    before = settings()
    with CHANGES[name]():
        assert settings() != before
    assert settings() == before and len(before) == len(SETTINGS)


def test_what_is_on_counts_in_full() -> None:
    with torch.autocast("cpu"):
        one = settings()
    with torch.autocast("cpu", torch.float16):
        two = settings()
    assert one != two
    with torch.device("meta"):
        meta = settings()
    with torch.device("cpu"):
        assert settings() != meta


def test_a_program_that_has_its_casts_runs_without_autocast() -> None:
    x = torch.ones(2, 2)
    run = lambda leaves: x @ x
    assert without_autocast(run, settings()) is run
    with torch.autocast("cpu"):
        assert run([]).dtype == torch.bfloat16
        assert without_autocast(run, settings())([]).dtype == torch.float32


def _flags() -> list[str]:
    """The settings of torch's tracers that are True or False."""
    homes = ("torch._dynamo.config", "torch._functorch.config", SYMBOLS)
    found: list[str] = []
    for home in homes:
        module = importlib.import_module(home)
        values = ((name, _value(module, name)) for name in sorted(module._config))
        found += [f"{home}.{name}" for name, x in values if isinstance(x, bool)]
    return found


def _value(module: Any, name: str) -> Any:
    """A setting, or None where it is only another name of one in another module."""
    return None if module._config[name].alias else getattr(module, name)


def layered(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Equal layers, a branch on a size and a generator."""
    for _ in range(3):
        x = torch.relu((x + y).sin() @ y) + (x + y) * 2.0
    parts = (part * 2 for part in x.split(2)) if x.shape[0] > 2 else (x,)
    return WEIGHT(torch.cat([*parts]))


def stepped(x: torch.Tensor, y: torch.Tensor) -> Any:
    """A loop."""
    return sf.scan(lambda c, row: (c + row * y.sum(), c.cos()), x[0], x)


STEPS: dict[str, Callable[..., Any]] = {
    "layers": sf.value_and_grad(lambda x, y: layered(x, y).square().sum(), (0, 1)),
    "a loop": sf.value_and_grad(lambda x, y: stepped(x, y)[1].sum(), (0, 1)),
}


@pytest.mark.parametrize("flag", _flags())
@pytest.mark.parametrize("name", STEPS)
def test_no_setting_of_the_tracers_changes_a_program(name: str, flag: str) -> None:
    x, y = torch.randn(2, 4, 4, dtype=torch.float64)
    wanted = STEPS[name](x, y)
    home, _, setting = flag.rpartition(".")
    config = importlib.import_module(home)
    sf.clear_cache()
    with config.patch({setting: not getattr(config, setting)}):
        found = sf.jit(STEPS[name], backend="aten")(x, y)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("flag", [SYMBOLS + ".translation_validation", REAL])
def test_dims_of_any_size_are_captured_whatever_the_settings(flag: str) -> None:
    home, _, setting = flag.rpartition(".")
    config = importlib.import_module(home)
    fn = sf.jit(lambda x: x.sum(0) * x.shape[0], backend="aten")
    with config.patch({setting: True}):
        for rows in (3, 5):
            x = sf.mark_dynamic(torch.randn(rows, 2), 0)
            torch.testing.assert_close(fn(x), x.sum(0) * rows)
