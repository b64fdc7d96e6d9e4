"""Placements at the door: what users write, as marks, and back as DTensor's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from shardfn import P, Stage, Zigzag, zigzag
from shardfn.placement import describe, is_spec, marks_of, spec_of, torch_placements
from shardfn.types import AxisPlacement, MeshAxes, MeshPlacements

AXES = MeshAxes(("dp", "tp"), (2, 3))
LINE = MeshAxes(("dp",), (2,))

WRITTEN = {
    "nothing": (P(), ("R", "R")),
    "an axis": (P("dp"), (0, "R")),
    "another dim": (P(None, "tp"), ("R", 1)),
    "two axes": (P("tp", "dp"), (1, 0)),
    "two axes on one dim": (P(None, ("dp", "tp")), (1, 1)),
    "one axis in a tuple": (P(("tp",)), ("R", 0)),
    "an empty tuple": (P((), "dp"), (1, "R")),
    "trailing dims": (P("dp", None, None), (0, "R")),
    "placements": ([Shard(1), Replicate()], (1, "R")),
    "a tuple of placements": ((Shard(1), Replicate()), (1, "R")),
    "from the end": ([Shard(-1), Shard(-3)], (2, 0)),
    "pending": ([Partial(), Partial("sum")], ("sum", "sum")),
    "a mean and a sum": ([Partial("avg"), Partial()], ("avg", "sum")),
    "a maximum": ([Shard(0), Partial("max")], (0, "max")),
    "a stage": (P(dp=1), ("@1", "R")),
    "a stage, beside a shard": (P(None, "tp", dp=0), ("@0", 1)),
    "a second stage of a coordinate": (P(tp=Stage(2, chunk=1)), ("R", "@2.1")),
    "stages on two axes": (P(dp=1, tp=0), ("@1", "@0")),
    "a stage among placements": ([Shard(0), Stage(2)], (0, "@2")),
    "a stage and a Partial": ([Stage(1, chunk=2), Partial()], ("@1.2", "sum")),
    "a minimum": ([Partial("min"), Shard(0)], ("min", 0)),
    "a zigzag": (P(zigzag("dp"), "tp"), ((0, 1, -2), 1)),
    "a zigzag in a tuple": (P(None, None, (zigzag("tp"),)), ("R", (2, 1, -2))),
    "zigzags of two dims": (P(zigzag("dp"), None, zigzag("tp")), ((0, 1, -2), (2, 1, -2))),
    "a zigzag among placements": ([Zigzag(-3), Shard(1)], ((0, 1, -2), 1)),
}


@pytest.mark.parametrize("case", list(WRITTEN))
def test_what_a_placement_means(case: str) -> None:
    spec, wanted = WRITTEN[case]
    assert marks_of(spec, (4, 5, 6), AXES) == wanted


def test_a_zigzag_of_one_rank_or_of_no_elements_is_plain() -> None:
    alone = MeshAxes(("dp", "tp"), (1, 2))
    assert marks_of(P(zigzag("dp"), zigzag("tp")), (5, 0), alone) == (0, 1)
    assert marks_of([Zigzag(0), Zigzag(1)], (5, 0), alone) == (0, 1)
    assert marks_of(P((zigzag("tp"), "dp")), (4, 5), alone) == (0, (0, 1, -2))


def test_a_zigzag_prints_as_it_is_written_and_back() -> None:
    for spec in (P("dp", zigzag("tp")), P((zigzag("tp"),), ("dp", "pp")), P(None, zigzag("a b"))):
        assert eval(repr(spec), {"P": P, "zigzag": zigzag}) == spec
        assert pickle.loads(pickle.dumps(spec)) == spec and hash(copy.copy(spec)) == hash(spec)
    assert repr(P("dp", (zigzag("tp"),))) == "P('dp', (zigzag('tp'),))"
    assert P(zigzag("dp")) != P("dp") and zigzag("dp") != zigzag("tp")
    assert spec_of(((0, 1, -2), 1), 2, AXES) == P(zigzag("dp"), "tp")
    assert torch_placements(((0, 1, -2), 1)) == (Zigzag(0), Shard(1))
    assert Zigzag(0) != Zigzag(1) and pickle.loads(pickle.dumps(Zigzag(1))) == Zigzag(1)
    assert Zigzag(0) not in (Shard(0), Replicate()) and Shard(0) != Zigzag(0)


def test_one_placement_is_enough_on_a_mesh_of_one_axis() -> None:
    assert marks_of(Shard(1), (4, 5), LINE) == (1,)
    assert marks_of(Replicate(), (), LINE) == ("R",)
    assert marks_of(P(), (), MeshAxes((), ())) == ()


REFUSED: dict[str, tuple[Any, str]] = {
    "too many dims": (
        P(None, None, "dp"),
        "P(None, None, 'dp') names dim 2 of a tensor with 2 dims, shape (4, 5)",
    ),
    "an unknown axis": (P("data"), "P('data') names axis 'data'; the mesh has (dp=2, tp=3)"),
    "an axis twice": (
        P("dp", ("dp", "tp")),
        "P('dp', ('dp', 'tp')) uses axis 'dp' twice, for dims 0 and 1",
    ),
    "a string": ("dp", "'dp' is not a placement; write P('dp') or a torch Placement"),
    "a number": (3, "3 is not a placement; write P(3) or a torch Placement"),
    "too few": ([Shard(0)], "1 placements [Shard(dim=0)] for a mesh of 2 axes (dp=2, tp=3)"),
    "a dim that is not there": (
        [Shard(2), Replicate()],
        "S(2) names dim 2 of a tensor with 2 dims, shape (4, 5)",
    ),
    "a dim before the first": (
        [Shard(-3), Replicate()],
        "S(-3) names dim -3 of a tensor with 2 dims, shape (4, 5)",
    ),
    "a product": (
        [Partial("product"), Replicate()],
        (
            "P(product) is not a placement that shardfn supports: Shard, Replicate, Stage, "
            "Zigzag, Partial of sum, avg, max or min"
        ),
    ),
    "a zigzag of chunks that the dim does not have": (
        P(None, zigzag("dp")),
        (
            "zigzag('dp') views dim 1 of size 5 as 4 equal chunks, two for each of 2 ranks, so 4 "
            "must divide it; pad it by 3"
        ),
    ),
    "a zigzag among placements, of chunks that the dim does not have": (
        [Replicate(), Zigzag(-2)],
        (
            "zigzag('tp') views dim 0 of size 4 as 6 equal chunks, two for each of 3 ranks, so 6 "
            "must divide it; pad it by 2"
        ),
    ),
    "a zigzag whose chunks another axis does not divide": (
        P((zigzag("dp"), "tp")),
        (
            "(zigzag('dp'), 'tp') views dim 0 of size 4 as 12 equal chunks, so 12 must divide it; "
            "pad it by 8"
        ),
    ),
    "a zigzag after an axis": (
        P(("tp", zigzag("dp"))),
        (
            "zigzag('dp') shards dim 0 after 'tp'; a zigzag must be the first axis of its dim: "
            "(zigzag('dp'), 'tp')"
        ),
    ),
    "a zigzag beside a shard": (
        [Zigzag(0), Shard(0)],
        (
            "zigzag('dp') shards dim 0 after 'tp'; a zigzag must be the first axis of its dim: "
            "(zigzag('dp'), 'tp')"
        ),
    ),
    "a zigzag of a dim that is not there": (
        [Zigzag(2), Replicate()],
        "Zigzag(2) names dim 2 of a tensor with 2 dims, shape (4, 5)",
    ),
    "a zigzag over no axis": (
        P(zigzag(3)),
        (
            "P(zigzag(3)) names zigzag(3) for dim 0, which is not an axis name; write "
            "'axis', a tuple of names, or None"
        ),
    ),
    "a stage that is not there": (
        P(tp=5),
        (
            "Stage(5) on axis 'tp', which has the stages 0 to 2; a second stage on a coordinate is "
            "sf.Stage(2, chunk=1)"
        ),
    ),
    "a stage that is not there, among placements": (
        [Stage(2), Replicate()],
        (
            "Stage(2) on axis 'dp', which has the stages 0 to 1; a second stage on a coordinate is "
            "sf.Stage(0, chunk=1)"
        ),
    ),
    "a stage below 0": (P(tp=-1), "Stage(-1) on axis 'tp': stage must be an int of 0 or more"),
    "a chunk below 0": (
        P(tp=Stage(0, chunk=-1)),
        "Stage(0, chunk=-1) on axis 'tp': chunk must be an int of 0 or more",
    ),
    "a stage of no int": (
        [Stage("0"), Replicate()],
        "Stage('0') on axis 'dp': stage must be an int of 0 or more",
    ),
    "a stage that is True": (P(tp=True), "tp=True is not a stage; write tp=0 or an sf.Stage"),
    "a stage by its name": (P(tp="first"), "tp='first' is not a stage; write tp=0 or an sf.Stage"),
    "a stage of an unknown axis": (P(pp=0), "P(pp=0) names axis 'pp'; the mesh has (dp=2, tp=3)"),
    "an axis for a dim and a stage": (
        P(None, "tp", tp=1),
        "P(None, 'tp', tp=1) uses axis 'tp' twice, for dim 1 and for a pipeline stage",
    ),
    "a stage alone": ([Stage(1)], "1 placements [Stage(1)] for a mesh of 2 axes (dp=2, tp=3)"),
    "a stage too many": (
        [Shard(0), Replicate(), Stage(1)],
        "3 placements [Shard(dim=0), Replicate(), Stage(1)] for a mesh of 2 axes (dp=2, tp=3)",
    ),
    "reductions of two kinds": (
        [Partial("max"), Partial("avg")],
        (
            "Partial(max) on dp, Partial(avg) on tp combines 2 kinds of Partial, whose order "
            "of reduction would matter; reduce one of them first"
        ),
    ),
}


def test_an_order_of_axes_whose_uneven_shards_dtensor_has_not_is_refused() -> None:
    axes = MeshAxes(("dp", "tp"), (3, 2))
    assert marks_of(P(("tp", "dp")), (9, 1), axes) == ((0, 1, 2), 0)
    with pytest.raises(ValueError) as error:
        marks_of(P(("tp", "dp")), (7, 1), axes)
    assert str(error.value) == (
        "P(('tp', 'dp')) shards dim 0 of size 7 over axes in another order than the mesh's "
        "(dp=3, tp=2), in shards that DTensor cannot describe; pad it by 1, so that 2 divides "
        "it, or write ('dp', 'tp')"
    )


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_does_not_fit_is_said_in_words(case: str) -> None:
    spec, said = REFUSED[case]
    with pytest.raises(ValueError) as error:
        marks_of(spec, (4, 5), AXES)
    assert str(error.value) == said


MARKS = st.tuples(*[st.sampled_from(("R", 0, 1, 2, "sum", "avg", "@0", "@1", "@0.1", "@1.12"))] * 2)


@given(MARKS)
@examples(30)
def test_torchs_placements_round_trip(marks: MeshPlacements) -> None:
    assert marks_of(list(torch_placements(marks)), (4, 5, 6), AXES) == marks


@given(MARKS)
@examples(30)
def test_p_says_what_torchs_placements_say(marks: MeshPlacements) -> None:
    parts: list[tuple[str, ...]] = [
        tuple(n for n, m in zip(AXES.names, marks, strict=True) if m == d) for d in range(3)
    ]
    plain = tuple("R" if m in ("sum", "avg") else m for m in marks)
    stages = {n: p for n, p in zip(AXES.names, torch_placements(marks), strict=True) if is_stage(p)}
    assert marks_of(P(*parts, **stages), (4, 5, 6), AXES) == plain


def is_stage(placement: Any) -> bool:
    return isinstance(placement, Stage)


@given(MARKS)
@examples(30)
def test_the_p_of_marks_says_them_again(marks: MeshPlacements) -> None:
    plain = tuple("R" if m in ("sum", "avg") else m for m in marks)
    spec = spec_of(marks, 3, AXES)
    assert marks_of(spec, (4, 5, 6), AXES) == plain
    assert eval(repr(spec), {"P": P, "Stage": Stage}) == spec


def test_a_stage_is_a_value() -> None:
    assert Stage(1) == Stage(1) != Stage(1, chunk=1)
    assert Stage(1) != Stage(0) and Stage(1) != Replicate()
    assert len({Stage(1), Stage(1, 0), Stage(0)}) == 2
    assert copy.deepcopy(Stage(1, chunk=2)) == Stage(1, chunk=2)
    assert pickle.loads(pickle.dumps([Stage(3)])) == [Stage(3)]
    assert P(pp=1) == P(pp=Stage(1)) != P(pp=Stage(1, chunk=1))
    assert repr(P(None, "tp", pp=1)) == "P(None, 'tp', pp=1)"


def test_marks_become_the_placements_that_dtensor_has() -> None:
    marks: tuple[AxisPlacement, ...] = ("R", 2, "sum", "avg", "max", "min")
    assert torch_placements(marks) == (
        Replicate(),
        Shard(2),
        *map(Partial, ("sum", "avg", "max", "min")),
    )
    with pytest.raises(
        AssertionError, match=r"the internal placement \(0, 3\) cannot leave the program"
    ):
        torch_placements(((0, 3),))


def test_marks_in_the_users_words() -> None:
    assert describe((0, "R"), AXES) == "Shard(dim=0) on dp, Replicate() on tp"
    assert describe(("@1", "@0.2"), AXES) == "Stage(1) on dp, Stage(0, chunk=2) on tp"
    assert describe((), MeshAxes((), ())) == "one device"


def test_p_prints_compares_and_hashes_by_its_parts() -> None:
    assert repr(P("dp", None, ("dp", "tp"))) == "P('dp', None, ('dp', 'tp'))"
    assert P("dp") == P("dp") != P("dp", None)
    assert len({P("dp"), P("dp"), P()}) == 2
    assert P("dp") != "dp"


def test_what_is_one_leaf_of_a_tree_of_placements() -> None:
    assert all(map(is_spec, (None, P(), P("dp"), Shard(0), Partial(), [Shard(0), Replicate()])))
    assert not any(map(is_spec, ("dp", [], [P()], (Shard(0),), {"w": P()}, [None], 3)))
