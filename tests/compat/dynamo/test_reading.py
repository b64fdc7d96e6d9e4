"""How Python is read: calls that stay, constants, substitutes, errors with their line, settings."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import shardfn as sf
from shardfn import _compat
from shardfn._compat.dynamo import reading
from shardfn._compat.settings import of_captures

X = torch.arange(3.0)


def test_reading_is_of_this_context_alone() -> None:
    assert not reading.is_reading() and not reading.is_tracing()
    with reading.reading() as mode:
        assert mode is None and reading.is_reading() and reading.is_tracing()
        empty = contextvars.Context()
        assert not empty.run(reading.is_reading)
    assert not reading.is_reading()


def test_inside_dynamos_mode_makes_no_symbols_of_values() -> None:
    env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    mode = torch._subclasses.FakeTensorMode(shape_env=env)
    before = env.settings
    context = torch._guards.tracing(torch._guards.TracingContext(mode))
    with mode, context, pytest.raises(ZeroDivisionError), reading.reading() as found:
        assert found is mode
        assert not env.settings.allow_scalar_outputs
        assert not env.settings.allow_dynamic_output_shape_ops
        raise ZeroDivisionError
    assert env.settings == before


def test_marked_functions_stay_calls_and_others_as_torch_says() -> None:
    def mine() -> None: ...

    def other() -> None: ...

    reading.keep_in_graph(mine)
    assert reading.kept_in_graph(lambda fn: False, mine)
    assert not reading.kept_in_graph(lambda fn: False, other)
    assert reading.kept_in_graph(lambda fn: True, other)
    assert not reading.kept_in_graph(lambda fn: False, [])


def test_an_error_of_a_constant_has_the_users_line() -> None:
    @reading.constant_in_graph
    def check(x: int) -> int:
        if x:
            raise sf.ShardError.of("f", "wrong")
        return 7

    assert check(0) == 7 and check._dynamo_marked_constant
    assert check.__name__ == "check"
    with pytest.raises(sf.ShardError) as caught:
        check(1)
    assert f"at: {__file__}:" in str(caught.value)


def test_an_error_of_ours_is_raised_in_place_of_dynamos_text() -> None:
    def run(cause: Exception) -> None:
        raise RuntimeError("a text") from cause

    with pytest.raises(sf.ShardError):
        reading.own_error_raised(run, sf.ShardError.of("f", "wrong"))
    with pytest.raises(RuntimeError, match="a text"):
        reading.own_error_raised(run, ValueError("other"))
    assert reading.own_error_raised(lambda x: x, 3) == 3


def test_substitutes_are_found_by_identity() -> None:
    def ours() -> None: ...

    table = {torch.sin: ours}
    assert reading.is_substituted(table, lambda fn: False, torch.sin)
    assert not reading.is_substituted(table, lambda fn: True, [])
    assert not reading.is_substituted(table, lambda fn: False, X)
    assert reading.is_substituted(table, lambda fn: fn == 3, 3)
    found = reading.substitutes(table, lambda: {torch.cos: "torch's"})
    assert found[torch.cos] == "torch's"
    assert found[torch.sin].__torch_dynamo_polyfill__ is ours
    assert reading.substitutes(table, dict)[torch.sin] is found[torch.sin]


def test_settings_of_a_capture_end_with_it() -> None:
    config = torch._dynamo.config
    before = config.automatic_dynamic_shapes, config.allow_rnn
    with of_captures():
        assert (config.automatic_dynamic_shapes, config.allow_rnn) == (False, True)
    assert (config.automatic_dynamic_shapes, config.allow_rnn) == before


def test_a_tensor_on_the_meta_device_is_of_the_programs_device() -> None:
    mode = _compat.fake_mode()
    make = mode.from_tensor
    assert reading.faked("cpu", make, torch.empty(2, device="meta")).device.type == "cpu"
    fake = reading.faked("meta", make, X)
    assert fake.device.type == "cpu" and fake.shape == (3,)
    view = X.view(3, 1)
    assert reading.faked("cpu", make, view).shape == (3, 1)


def test_a_function_keeps_its_parts_over_its_own_globals() -> None:
    def fn(a: Any, b: int = 4) -> Any:
        return a + b + len(str(X))

    own = reading._with_own_globals(fn)
    assert own(1) == fn(1) and own.__globals__ is not fn.__globals__
    assert own.__closure__ == fn.__closure__ and own.__defaults__ == (4,)


def test_dynamos_graph_gives_the_results_of_the_function() -> None:
    def fn(x: torch.Tensor) -> Any:
        return {"y": x * 2, "n": 3, "same": x}

    graph, reads, _ = reading.capture_python(fn, (X,), [X])
    assert reads == ()
    codegen: Any = graph.graph._codegen
    outs = torch.fx.Interpreter(graph).run(*codegen.process_inputs(X), enable_io_processing=False)
    found = reading.python_results(graph, outs)
    assert found["y"].tolist() == [0, 2, 4] and found["n"] == 3
    assert torch.equal(found["same"], X)
