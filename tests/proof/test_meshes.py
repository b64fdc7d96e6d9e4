"""Tests over meshes: what is tried, and how small a failure becomes."""

from __future__ import annotations

import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from ranks import run_ranks

import shardfn as sf

SHAPES = {"x": ("b", "d"), "w": ("d", "k")}
pytest_plugins = ["pytester"]


def failure(test: Any, **given: Any) -> BaseException:
    """The error that a test over meshes raises."""
    with pytest.raises(BaseException) as caught:
        test(**given)
    return caught.value


def notes(error: BaseException) -> tuple[str, str]:
    """The summary of a failure, and its program."""
    summary, program = error.__notes__[-2:]
    return summary, program


def check_program(error: BaseException) -> str:
    """Check that the program of a failure raises the same error, and return its summary."""
    summary, program = notes(error)
    assert len(program.splitlines()) <= 10
    with pytest.raises(type(error)) as again:
        exec(compile(program, "<program>", "exec"), {"__name__": "program"})
    assert is_plain(again.value, error)
    return summary


def is_plain(error: BaseException, rewritten: BaseException) -> bool:
    """Whether an error says what another one does, of which pytest may have written the text."""
    return not str(error) or str(error).splitlines()[0] == str(rewritten).splitlines()[0]


@sf.meshes("1..4", shapes=SHAPES, examples=12)
def product(mesh, x, w):
    y = sf.shard(lambda x, w: x @ w, mesh)(x, w)
    torch.testing.assert_close(sf.full(y), sf.full(x) @ sf.full(w))


def test_a_right_function_passes_on_many_meshes_sizes_and_placements() -> None:
    seen = []

    @sf.meshes("1..8", shapes=SHAPES, examples=60)
    def look(mesh, x, w):
        assert x.shape[1] == w.shape[0] and x.dtype == torch.float64
        seen.append((mesh.shape, x.shape, x.placements))

    look()
    meshes = {shape for shape, _, _ in seen}
    assert {*((n,) for n in range(1, 9)), (2, 4), (4, 2), (2, 2, 2), (2, 3)} <= meshes
    assert {(1, 1), (1, 2), (2, 1)} <= meshes  # axes of one rank
    assert {str(p) for m, _, p in seen if len(m) == 1} == {
        "(Replicate(),)",
        "(Shard(dim=0),)",
        "(Shard(dim=1),)",
    }
    uneven = [s for m, s, p in seen if m == (3,) and p[0].is_shard() and s[p[0].dim] % 3]
    assert uneven


def test_a_law_holds_for_a_product() -> None:
    product()


def test_it_runs_the_same_examples_each_time() -> None:
    def examples() -> list[Any]:
        seen = []

        @sf.meshes("1..6", shapes=SHAPES)
        def look(mesh, x, w):
            seen.append((mesh.shape, x.shape, x.placements, float(sf.full(x).sum())))

        look()
        return seen

    assert examples() == examples()


@sf.meshes("1..8", shapes={"x": ("b", "d"), "w": ("d",)})
def mean_of_means(mesh, x, w):
    """Each rank's mean, then the mean over ranks: wrong for uneven shards."""
    local = [x.to_local(rank=rank) for rank in range(mesh.size())]
    means = [part.mean() for part in local if part.numel()]
    mean = torch.stack(means).mean()
    torch.testing.assert_close(mean, sf.full(x).mean())


def test_a_mean_of_means_fails_on_two_ranks_with_three_elements() -> None:
    summary = check_program(failure(mean_of_means))
    by_rows = "x (3, 1) at P('dp'), w (1,) at P()"
    by_columns = "x (1, 3) at P(None, 'dp'), w (3,) at P()"
    assert "fails on mesh (dp=2), " in summary
    assert by_rows in summary or by_columns in summary


def test_the_smallest_size_and_the_only_sharded_argument_are_left() -> None:
    @sf.meshes("2..6", shapes=SHAPES)
    def summed(mesh, x, w):
        assert not any(p.is_shard(1) for p in w.placements)

    summary = check_program(failure(summed))
    assert "mesh (dp=2), x (1, 1) at P(), w (1, 1) at P(None, 'dp')" in summary


@pytest.mark.parametrize(
    ("condition", "smallest"),
    [
        (lambda mesh, x: mesh.size() % 4 == 0, "mesh (dp=4), x (1, 1) at P()"),
        (lambda mesh, x: mesh.ndim == 2, "mesh (dp=1, tp=1), x (1, 1) at P()"),
        (lambda mesh, x: min(mesh.shape) > 1 and mesh.ndim == 3, "mesh (dp=2, tp=2, cp=2)"),
        (
            lambda mesh, x: mesh.shape[0] > 2 and x.placements[0].is_shard(0),
            "mesh (dp=3), x (1, 1) at P('dp')",
        ),
        (
            lambda mesh, x: sum(p.is_shard(1) for p in x.placements) == 2,
            "mesh (dp=1, tp=1), x (1, 1) at P(None, ('dp', 'tp'))",
        ),
        (
            lambda mesh, x: x.shape[0] % mesh.size() == 2 and x.placements[0].is_shard(0),
            "mesh (dp=3), x (2, 1) at P('dp')",
        ),
    ],
)
def test_a_failure_shrinks_to_the_smallest_mesh(condition: Any, smallest: str) -> None:
    @sf.meshes("1..8", shapes={"x": ("b", "d")}, examples=80)
    def planted(mesh, x):
        assert not condition(mesh, x)

    summary, _ = notes(failure(planted))
    assert smallest in summary


def test_another_failure_on_the_way_is_not_taken_for_it() -> None:
    @sf.meshes("3..5", shapes={"x": ("b", "d")})
    def planted(mesh, x):
        if x.shape[0] == 1:
            raise ValueError("one row")
        assert x.shape[1] < 0

    first = failure(planted)
    assert isinstance(first, ValueError)  # hypothesis tries the smallest sizes first
    assert "x (1, 1)" in notes(first)[0]


def test_the_note_counts_and_tells_how_to_run_it() -> None:
    summary, program = notes(failure(mean_of_means))
    head, counts, how = summary.splitlines()
    assert head.startswith("meshes: mean_of_means fails on mesh (dp=2), ")
    assert "failures; " in counts and counts.endswith("examples passed")
    assert how == (
        "  these lines, saved as program.py, fail in the same way with python program.py:"
    )
    assert program.splitlines()[-1] == "    mean_of_means(mesh=mesh, x=x, w=w)"


def test_the_program_runs_alone_and_after_a_world_of_one_real_rank(tmp_path: Path) -> None:
    error = failure(mean_of_means)
    look = (
        "import shardfn as sf\n"
        "mesh, seen = sf.make_mesh((1,), ('dp',)), set()\n"
        "@sf.meshes('1..3', shapes={'x': ('b',)})\n"
        "def look(mesh, x): seen.add(mesh.size())\n"
        "look()\n"
        "assert seen == {1, 2, 3} and mesh.size() == 1\n"
        "sf.distribute({'x': None}, mesh, None)\n"
        "import torch.distributed as dist; dist.destroy_process_group()\n"
    )
    file = tmp_path / "program.py"
    file.write_text(look + notes(error)[1])
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Scalars are not close" in done.stderr
    assert "meshes:" not in done.stderr  # the test runs once


def test_called_with_its_arguments_a_test_runs_once() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        x, w = (sf.distribute(torch.ones(s), mesh, sf.P()) for s in ((3, 2), (2,)))
        mean_of_means(mesh=mesh, x=x, w=w)


def test_pytest_gives_fixtures_and_cases(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest, shardfn as sf\n"
        "@pytest.fixture\n"
        "def limit(): return 3\n"
        "@pytest.mark.parametrize('k', [1, 20])\n"
        "@sf.meshes([2, 3], shapes={'x': ('b', 2)})\n"
        "def test_below(limit, mesh, x, k):\n"
        "    rows = x.shape[0]\n"
        "    few = limit + k\n"
        "    ranks = mesh.size()\n"
        "    assert rows * ranks > 0\n"
        "    assert rows < few\n"
        "class TestRows:\n"
        "    @sf.meshes(2, shapes={'x': ('b', 2)})\n"
        "    def test_rows(self, x, tmp_path):\n"
        "        assert x.shape[0] < 2\n"
        "@sf.meshes(2)\n"
        "def test_skipped(mesh):\n"
        "    pytest.skip('not here')\n"
    )
    done = pytester.runpytest_inprocess("-q", "-rs", "-p", "no:cacheprovider")
    out = done.stdout.str()
    done.assert_outcomes(failed=2, passed=1, skipped=1)
    assert "not here" in out
    assert "test_below(mesh=mesh, x=x, limit=3, k=1)" in out
    assert "x (4, 2) at P()" in out and "x (2, 2) at P()" in out
    assert "TestRows().test_rows(x=x, tmp_path=...)  # make here: tmp_path, a PosixPath" in out
    assert "meshes.py" not in out and "hypothesis" not in out  # the frames are the user's


def test_a_method_and_a_unittest_are_called_by_their_class() -> None:
    assert "OfClass().rows(mesh=mesh, x=x)" in check_and_program(OfClass().rows)
    assert "OfCase('rows').rows(mesh=mesh, x=x)" in check_and_program(OfCase("rows").rows)


def check_and_program(test: Any) -> str:
    error = failure(test)
    check_program(error)
    return notes(error)[1]


class OfClass:
    @sf.meshes([2, 3], shapes={"x": ("b",)})
    def rows(self, mesh, x):
        assert x.shape[0] < 2


class OfCase(unittest.TestCase):
    @sf.meshes([2, 3], shapes={"x": ("b",)})
    def rows(self, mesh, x):
        assert x.shape[0] < 2


def test_a_failure_of_pytest_and_a_rejected_example() -> None:
    @sf.meshes([2, 3], shapes={"x": ("b", "d")})
    def odd(mesh, x):
        hypothesis.assume(x.shape[0] % 2 == 1)
        if x.shape[0] > 1:
            pytest.fail("three rows")

    error = failure(odd)
    assert "three rows" in str(error)
    assert "x (3, 1) at P()" in notes(error)[0]


def test_torchs_random_numbers_are_seeded_and_given_back() -> None:
    seen = []

    @sf.meshes(2, shapes={"x": (3,)}, examples=2)
    def draws(x):
        seen.append(float(torch.rand(())))

    before = torch.get_rng_state()
    draws()
    assert torch.equal(before, torch.get_rng_state())
    assert len(seen) == 2 and seen[0] == seen[1]


def test_a_test_that_fails_once_only_is_named() -> None:
    seen = []

    @sf.meshes(2, shapes={"x": ("b",)})
    def flaky(mesh, x):
        seen.append(x.shape)
        assert len(seen) != 4

    error = failure(flaky)
    assert isinstance(error, sf.DivergenceError)
    assert (
        str(error)
        .splitlines()[0]
        .endswith("flaky fails once, and then passes with the same example")
    )
    assert "try: set seeds inside the test" in str(error)


def test_in_an_open_world_the_meshes_are_its_own() -> None:
    seen = []

    @sf.meshes("1..8", shapes={"x": ("b",)})
    def look(mesh, x):
        seen.append(mesh.shape)

    with sf.fake_world(4):
        look()
    assert {*seen} == {(4,), (2, 2)}
    with sf.fake_world(9), pytest.raises(pytest.skip.Exception, match="fits the 9 ranks"):
        look()


def of_ranks() -> tuple[int, str]:
    """The examples of a right test, and the notes of a wrong one, on one rank of a job."""
    seen = []

    @sf.meshes("1..8", shapes=SHAPES, examples=12)
    def right(mesh, x, w):
        seen.append(mesh.shape)
        assert sf.full(x).shape[1] == sf.full(w).shape[0]

    @sf.meshes("1..8", shapes=SHAPES, examples=12)
    def wrong(mesh, x, w):
        rank = mesh.get_rank()
        assert rank == 0 or not x.placements[0].is_shard()  # on one rank alone

    right()
    try:
        wrong()
    except (AssertionError, sf.DivergenceError) as error:
        return len(seen), "\n".join([*error.__notes__[-2:], str(error)])
    return len(seen), ""


def test_on_real_ranks_all_draw_the_same_and_fail_together() -> None:
    (n, first), (m, second) = run_ranks(2, of_ranks)
    assert n == m > 5
    for text in (first, second):
        assert "wrong fails on mesh (dp=2), x (1, 1) at P('dp'), w (1, 1) at P()" in text
        assert "torchrun --nproc-per-node=2 program.py" in text
        assert "fake_world" not in text
    assert "rank 1 fails, but this rank passes" in first
    assert "rank 1 fails" not in second


def test_hypothesis_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(sf.ShardError) as error:
        product()
    assert str(error.value) == (
        "meshes: hypothesis is not installed\n  try: pip install hypothesis"
    )


async def asynchronous(mesh):
    pass


def generating(mesh):
    yield


@pytest.mark.parametrize(
    ("test", "text"),
    [
        (3, "it decorates 3, a int"),
        (OfClass, "it decorates <class"),
        (asynchronous, "asynchronous is async"),
        (generating, "generating yields"),
    ],
)
def test_what_is_no_plain_function_is_refused(test: Any, text: str) -> None:
    with pytest.raises(sf.ShardError) as error:
        sf.meshes()(test)
    assert text in str(error.value)
    assert "needed: a plain function" in str(error.value)


def test_a_parameter_that_the_test_lacks_is_named() -> None:
    with pytest.raises(sf.ShardError) as error:
        sf.meshes(shapes=SHAPES)(lambda mesh, x: None)
    assert "<lambda> has no parameter 'w'" in str(error.value)
    assert "try: def <lambda>(mesh, x, w): ..." in str(error.value)


def test_a_test_whose_examples_are_all_rejected_is_no_pass() -> None:
    @sf.meshes(2, shapes={"x": ("b", "d")}, sizes={"b": [3, 5]}, placements=sf.P(sf.zigzag("dp")))
    def never(x):
        raise AssertionError

    with pytest.raises(sf.ShardError) as error:
        never()
    assert "never was run, because each one was rejected" in str(error.value)
    assert "try: sizes=" in str(error.value)
