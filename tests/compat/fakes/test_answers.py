"""Results of fake tensors that are remembered are those that torch computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from shardfn import _compat
from shardfn._compat.fakes import answers

X = torch.rand(6, 4)
LONG = torch.arange(6)
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "sum of two": lambda x, i: x + x.T.contiguous().T,
    "integer and fraction": lambda x, i: i * 0.5,
    "integer and integer": lambda x, i: i * 2,
    "truth": lambda x, i: i * True,
    "float64": lambda x, i: x.to(torch.float64),
    "row": lambda x, i: x[3],
    "transposed row": lambda x, i: x.T[1],
    "expanded": lambda x, i: x[:1].expand(5, 4),
    "part of a view": lambda x, i: x[2:].view(2, 2, 4)[:, 1],
    "largest": lambda x, i: x.max(dim=1),
    "norm": lambda x, i: torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5),
    "rows": lambda x, i: x[i],
    "filled": lambda x, i: torch.full((3, 2), 1.0),
    "list of indices": lambda x, i: torch.ops.aten.index.Tensor(x, [None, i[:2]]),
    "several": lambda x, i: x.split(2),
}


def described(x: Any) -> Any:
    """All that a graph asks of a fake tensor."""
    if not isinstance(x, torch.Tensor):
        return [described(part) for part in x]
    places = x.stride(), x.storage_offset(), x.untyped_storage().nbytes()
    return x.shape, *places, x.dtype, x.device, x.requires_grad


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    answers._ANSWERS.clear()
    FakeTensorMode.cache_clear()
    yield
    answers._ANSWERS.clear()


@pytest.mark.parametrize("name", OPS)
def test_a_remembered_result_is_that_of_torch(name: str) -> None:
    mode = _compat.fake_mode()
    x, i = mode.from_tensor(X), mode.from_tensor(LONG)
    with mode:
        wanted = described(OPS[name](x, i))
        FakeTensorMode.cache_clear()
        with _compat.patched("fakes"):
            found = [described(OPS[name](x, i)) for _ in range(3)]
    assert found == [wanted] * 3
    assert answers._ANSWERS


def test_nothing_is_computed_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = _compat.fake_mode()
    x = mode.from_tensor(X)
    with _compat.patched("fakes"):
        (x.T @ x).exp()
        monkeypatch.setattr(FakeTensorMode, "_cache_key", lambda *args: 1 / 0)
        assert (x.T @ x).exp().shape == (4, 4)
        with pytest.raises(ZeroDivisionError):
            x.sin()


def test_results_of_collectives_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d = torch.ops._c10d_functional
    mode = _compat.fake_mode()
    x = mode.from_tensor(X)

    def gathered() -> Any:
        rows = c10d.all_gather_into_tensor(x, 3, "ranks")
        return described([rows, c10d.wait_tensor(c10d.all_reduce(x, "sum", "ranks"))])

    with _compat.patched("fakes"):
        wanted = gathered()
        monkeypatch.setattr(FakeTensorMode, "_cache_key", lambda *args: 1 / 0)
        assert gathered() == wanted
        assert [part[0] for part in wanted] == [(18, 4), (6, 4)]


def test_a_view_has_the_memory_of_its_tensor() -> None:
    mode = _compat.fake_mode()
    x = mode.from_tensor(X)
    with _compat.patched("fakes"):
        first, second = x[1:].T, x[1:].T
    (mine,) = {y.untyped_storage()._cdata for y in (first, second)}
    assert mine == x.untyped_storage()._cdata


def test_a_result_is_a_tensor_of_its_own() -> None:
    mode = _compat.fake_mode()
    x = mode.from_tensor(X)
    with _compat.patched("fakes"):
        made = [x * 2 for _ in range(3)]
    assert len({y.untyped_storage()._cdata for y in made}) == 3


def test_a_tensor_changed_in_place_is_itself() -> None:
    mode = _compat.fake_mode()
    x = mode.from_tensor(X.clone())
    with _compat.patched("fakes"):
        assert all(x.add_(1) is x for _ in range(3))


def test_results_follow_the_default_dtype() -> None:
    mode = _compat.fake_mode()
    i = mode.from_tensor(LONG)
    with _compat.patched("fakes"):
        assert all((i / 2).dtype == torch.float32 for _ in range(2))
        torch.set_default_dtype(torch.float64)
        try:
            assert all((i / 2).dtype == torch.float64 for _ in range(2))
        finally:
            torch.set_default_dtype(torch.float32)


def not_plain(mode: FakeTensorMode) -> dict[str, torch.Tensor]:
    """Tensors whose results depend on more than their sizes and dtypes."""
    dims = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    symbols = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        number = torch.tensor(2.0)
    return {
        "size that is a symbol": symbols.from_tensor(X, symbolic_context=dims),
        "value": number,
        "conjugate": mode.from_tensor(X.to(torch.complex64)).conj(),
        "sparse": mode.from_tensor(X.to_sparse()),
        "no fake tensor": X,
        "tensor of another mode": _compat.fake_mode().from_tensor(X),
    }


@pytest.mark.parametrize("name", list(not_plain(FakeTensorMode())))
def test_results_of_tensors_that_are_not_plain_are_torchs(name: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    x = not_plain(mode)[name]
    assert answers._key(mode, torch.ops.aten.exp.default, (x,), {}) is None


def test_what_torch_does_not_remember_is_computed() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    x = mode.from_tensor(X)
    with _compat.patched("fakes"):
        first, second = (x.nonzero() for _ in range(2))
    assert type(first) is FakeTensor and first.shape[1] == second.shape[1] == 2
    assert not any("nonzero" in str(key[0]) for key in answers._ANSWERS)


def test_they_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST", 3)
    mode = _compat.fake_mode()
    with _compat.patched("fakes"):
        for rows in range(1, 9):
            mode.from_tensor(torch.rand(rows)).sin()
            assert len(answers._ANSWERS) <= 3


def test_other_threads_have_torchs_results() -> None:
    def asked() -> None:
        mode = FakeTensorMode()
        mode.from_tensor(X).sin()

    with _compat.patched("fakes"):
        thread = threading.Thread(target=asked)
        thread.start()
        thread.join()
    assert not answers._ANSWERS


@pytest.mark.parametrize("name", OPS)
def test_a_result_past_the_dispatcher_is_that_of_torch(name: str) -> None:
    mode = _compat.fake_mode()
    x, i = mode.from_tensor(X), mode.from_tensor(LONG)

    class Past(torch.utils._python_dispatch.TorchDispatchMode):
        """Looks each op's result up past the dispatcher."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return answers.result_of(mode, func, args, kwargs or {})

    with mode, _compat.patched("fakes"):
        wanted = described(OPS[name](x, i))
        with Past():
            found = [described(OPS[name](x, i)) for _ in range(2)]
    assert found == [wanted] * 2


def test_a_known_result_needs_no_dispatcher_and_shares_no_memory() -> None:
    mode = _compat.fake_mode()
    x = mode.from_tensor(X)
    add = torch.ops.aten.add.Tensor
    with mode, _compat.patched("fakes"):
        first = add(x, x)
        passed: list[Any] = []
        other = answers.result_of(mode, lambda *args: passed.append(args), (x, x), {})
        second = answers.result_of(mode, add, (x, x), {})
        with torch._C._DisableTorchDispatch():  # where fake tensors have no kernels
            third = answers.result_of(mode, add, (x, x), {})
    assert other is None and passed == [(x, x)]  # what is no op is called
    assert described(first) == described(second) == described(third)
    memories = {y.untyped_storage()._cdata for y in (x, first, second, third)}
    assert len(memories) == 4


def test_a_fresh_tensor_has_the_layout_of_another_and_its_own_memory() -> None:
    mode = _compat.fake_mode()
    x = mode.from_tensor(X)
    with mode:
        like = x.T[1:]
    a, b = answers.fresh(like), answers.fresh(like)
    assert (a.shape, a.stride(), a.dtype, a.device) == (
        like.shape,
        like.stride(),
        like.dtype,
        like.device,
    )
    assert a.fake_mode is mode and not a.requires_grad and a.storage_offset() == 0
    other = _compat.fake_mode()
    c = answers.fresh(like, other)
    assert c.fake_mode is other and described(c) == described(a)
    assert len({y.untyped_storage()._cdata for y in (like, a, b)}) == 3
