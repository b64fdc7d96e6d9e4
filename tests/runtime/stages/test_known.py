"""Which known capture fits a call: by its signature, its world, its mesh, and what it read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

import shardfn as sf
from shardfn.runtime import cache
from shardfn.runtime.arguments import arguments_of, place, taken
from shardfn.runtime.options import Request
from shardfn.runtime.stages import known
from shardfn.runtime.stages.known import Made
from shardfn.world import World

WORLD = World("simulated", 2, 0)


def capture(**facts: Any) -> Any:
    """A capture that fits every call, but for these facts."""
    reads = {"same": True, "asks_world": False, "is_lost": False}
    outside = {"is_known": True, "is_unchanged": True}
    for group in (reads, outside):
        group.update({k: facts.pop(k) for k in [*facts] if k in group})
    says = lambda group: {k: x if k == "asks_world" else (lambda x=x: x) for k, x in group.items()}
    made = {
        "reads": SimpleNamespace(**says(reads)),
        "outside": SimpleNamespace(**says(outside)),
        "own_mesh": None,
        "mesh": None,
        "brought_mesh": None,
        "template": None,
        "fixed": "",
        "facts": (),
    }
    return SimpleNamespace(**{**made, **facts})


def made(captured: Any, signature: Any = ("rest", []), mesh: Any = None) -> Made:
    return Made(signature, WORLD, mesh, captured)


def placed(mesh: Any = None, world: World = WORLD, dynamic: Any = None) -> Any:
    axes = known.axes_of(mesh)
    return SimpleNamespace(world=world, mesh=mesh, axes=axes, dynamic=dynamic or {})


def is_for(captured: Any, call: Any, mesh: Any = None) -> bool:
    return known._is_for(made(captured, mesh=mesh), call)


def test_a_capture_is_for_what_it_read_and_closed_over() -> None:
    assert is_for(capture(), placed())
    for fact in ("same", "is_known", "is_unchanged"):
        assert not is_for(capture(**{fact: False}), placed()), fact


def test_a_capture_that_asks_for_the_world_is_for_that_world() -> None:
    other = attrs.evolve(WORLD)
    assert is_for(capture(), placed(world=other))
    assert is_for(capture(asks_world=True), placed())
    assert not is_for(capture(asks_world=True), placed(world=other))
    assert not is_for(capture(asks_world=True), placed(), mesh="another")


def test_a_capture_that_names_a_mesh_is_for_that_mesh() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"))
        other = sf.make_mesh((4,), ("a",))
        own = capture(own_mesh=mesh)
        assert is_for(own, placed()) and is_for(own, placed(mesh))
        assert not is_for(own, placed(other))
    assert not is_for(own, placed()), "its world has ended"


def test_a_capture_with_a_shard_map_is_for_axes_of_these_sizes() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"))
        same = sf.make_mesh((2, 2), ("a", "b"))
        other = sf.make_mesh((2, 2), ("a", "c"))
        inside = capture(mesh=mesh)
        assert is_for(inside, placed(same))
        assert not is_for(inside, placed(other)) and not is_for(inside, placed())
        assert is_for(capture(mesh=mesh, brought_mesh=mesh), placed())


def test_lost_and_old_programs_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PROGRAMS", 2)
    first, lost, second, third = (
        made(capture(is_lost=gone)) for gone in (False, True, False, False)
    )
    programs = [first, lost]
    known._remember(programs, second)
    assert programs == [first, second]
    known._remember(programs, third)
    assert programs == [second, third]


def test_why_sizes_are_constants_is_known_from_an_earlier_capture() -> None:
    earlier = [made(capture()), made(capture(fixed="it reads x.shape[0]"))]
    fixed = lambda dims, rest="rest": known._fixed(earlier, (rest, []), placed(dynamic=dims))
    assert fixed({0: {0: False}}) == "it reads x.shape[0]"
    assert fixed({0: {0: True}}) == "", "a strict dim must say it itself"
    assert fixed({}) == fixed({0: {0: False}}, "other") == ""


def test_a_template_is_for_calls_that_fit_it() -> None:
    asked: list[Any] = []

    class Template:
        def is_alike(self, leaves: Any, others: Any) -> bool:
            return leaves != ["other"]

        def misfit(self, leaves: Any) -> str | None:
            asked.append(leaves)
            return None if leaves == ["fits"] else "x has 3 rows"

    template = Template()
    rows = [made(capture(template=template)) for _ in range(3)]
    of = lambda leaves, rest="rest": known._template(rows, (rest, leaves), placed(), [])
    assert of(["fits"]) is template
    asked.clear()
    assert of(["odd"]) is None and len(asked) == 1, "asked once for all captures"
    assert of(["other"]) is None and of(["fits"], "another") is None
    lost = [made(capture(template=template, same=False))]
    assert known._template(lost, ("rest", ["fits"]), placed(), []) is None


def test_results_of_code_of_one_rank_have_the_paths_of_the_first_of_two() -> None:
    @attrs.frozen
    class Program:
        out_paths: tuple[str, ...]

    @attrs.frozen
    class Captured:
        program: Program

    paths = ("result[0]", "result[0]['w']", "gradient of result[0]")
    named = known._with_paths(Captured(Program(paths)))
    assert named.program.out_paths == (
        "result", "result['w']", "gradient of result",
    )  # fmt: skip


def test_a_call_like_an_earlier_one_captures_nothing() -> None:
    fn = lambda x, n: x * n
    asks = Request("f", fn, fn)

    def captured(x: Any, n: Any) -> Any:
        arguments = arguments_of(asks, taken(asks, (x, n), {}))
        return known.captured_for(asks, arguments, place(asks, arguments))

    before = cache.counts["captures"]
    first = captured(torch.ones(2), 3)
    assert captured(torch.zeros(2), 3) is first
    assert cache.counts["captures"] == before + 1
    assert captured(torch.ones(2), 4) is not first
    assert cache.counts["captures"] == before + 2
