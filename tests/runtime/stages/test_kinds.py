"""Kinds of ranks: which ranks share a program, by scripted captures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

import shardfn as sf
from shardfn import _compat
from shardfn.capture import own_sizes
from shardfn.mesh import axes_of
from shardfn.runtime.options import Request
from shardfn.runtime.stages import kinds
from shardfn.types import TENSOR
from tests.capture.dtensors.test_own_sizes import graph

X = torch.ones(2, 3)
TREE = SimpleNamespace(out_tree="tree", out_leaves=(TENSOR,))


def fn(x: Any) -> Any: ...


def captured(cuts: Any = (), rows: int = 3, **facts: Any) -> Any:
    outside = SimpleNamespace(draws=0, shared=(), refuse_lost=lambda name: None)
    made = {"program": TREE, "outside": outside, "cuts": cuts}
    traits = own_sizes.traits(graph(rows))
    return SimpleNamespace(**{**made, "traits": traits, **facts})


@attrs.define
class Script:
    """Captures a rank's code: dim 0 of 5 rows over an axis of the mesh."""

    axis: str
    size: int
    is_constant: bool = False
    asked: list[Request] = attrs.field(factory=list)

    def __call__(self, request: Request, *_: Any) -> Any:
        self.asked.append(request)
        names = ("dp", "tp")
        at = dict(zip(names, request.rank or (), strict=True))
        rows = ((self.axis, self.size, "S0"),)
        mine = own_sizes.local_shape(rows, (5, 2), at)
        rows_read = 1 if self.is_constant else mine[0]
        return captured([(rows, (5, 2), mine)], rows_read)


def found(
    monkeypatch: pytest.MonkeyPatch, script: Any, rank: int = 0, **options: Any
) -> list[kinds.Kind]:
    """The kinds of ranks of a 2 by 3 mesh, on one of them."""
    monkeypatch.setattr(kinds, "captured_for", script)
    with sf.fake_world(6, rank):
        mesh = sf.make_mesh((2, 3), ("dp", "tp"))
        coordinate = divmod(rank, 3)
        placed: Any = SimpleNamespace(axes=axes_of(mesh), coordinate=coordinate)
        request = Request("f", fn, fn, mesh=mesh, **options)
        return kinds.kinds_of_ranks(request, (), {}, placed)


def test_ranks_of_equal_shards_share_a_program(monkeypatch: Any) -> None:
    every = found(monkeypatch, Script("tp", 3, is_constant=True))
    ranks = [kind.ranks for kind in every]
    assert ranks == [((0, 0), (0, 1), (1, 0), (1, 1)), ((0, 2), (1, 2))], "2, 2 and 1 rows"


def test_the_kind_of_this_rank_is_the_first(monkeypatch: Any) -> None:
    script = Script("dp", 2, is_constant=True)
    first, second = found(monkeypatch, script, rank=4)
    assert first.ranks[0] == (1, 1) and set(first.ranks) == {
        (1, 0), (1, 1), (1, 2),
    }  # fmt: skip
    assert second.ranks == ((0, 0), (0, 1), (0, 2))
    assert [request.rank for request in script.asked] == [(1, 1), (0, 0)]


def test_constants_that_differ_are_read_again_as_such(monkeypatch: Any) -> None:
    script = Script("dp", 2)
    found(monkeypatch, script)
    assert [r.differing for r in script.asked] == [
        frozenset(), frozenset(), {(0, 1)}, {(0, 1)},
    ]  # fmt: skip


def test_ranks_of_other_layouts_have_programs_of_their_own(monkeypatch: Any) -> None:
    monkeypatch.setattr(kinds, "look", lambda *_: SimpleNamespace())
    monkeypatch.setattr(kinds, "_like", lambda x, shape, stride: (x, shape))
    rows = [((2,), (1,))] * 5 + [((3,), (1,))]
    script = lambda *_: captured()
    monkeypatch.setattr(kinds._tree, "quick_leaves", lambda _: ["x"])
    monkeypatch.setattr(kinds._tree, "refill", lambda _, leaves: (leaves, {}))
    every = found(monkeypatch, script, layouts=(tuple(rows),))
    assert [len(kind.ranks) for kind in every] == [5, 1]


def test_a_request_with_other_fields_is_made_once() -> None:
    request = Request("f", fn, fn)
    one = kinds._asking(request, rank=(0,))
    assert one.rank == (0,) and kinds._asking(request, rank=(0,)) is one
    assert kinds._asking(request, rank=(1,)) is not one


def test_an_argument_of_another_rank_has_its_sizes() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        spec = _compat.dtensor_spec(
            mesh, (torch.distributed.tensor.Shard(0),), (2, 2, 3), (6, 3, 1), X.dtype
        )
        x = _compat.dtensors([X.unsqueeze(0)], [spec])[0]
        like = kinds._like(x, (5, 3), (1, 5))
        assert like.shape == (2, 5, 3) and like.stride() == (15, 1, 5)
        request = Request("f", fn, fn, layouts=(None, (((4,), (1,)),) * 2))
        args = kinds._arguments_of(request, (3, x), {}, 1)
        assert args[0][0] == 3 and args[0][1].shape == (2, 4)


OTHER = {
    "return other trees": {"program": SimpleNamespace(out_tree="tree", out_leaves=(3,))},
    "read other tensors": {"outside": SimpleNamespace(draws=0, shared=(X,))},
    "draw other numbers": {"outside": SimpleNamespace(draws=1, shared=())},
}


@pytest.mark.parametrize("text", OTHER)
def test_results_must_be_alike(text: str) -> None:
    kinds._refuse_other_results("f", captured(), captured())
    with pytest.raises(sf.TreeError) as caught:
        kinds._refuse_other_results("f", captured(), captured(**OTHER[text]))
    assert "ranks whose shards have other sizes" in str(caught.value)
    assert text in str(caught.value)
