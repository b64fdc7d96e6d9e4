"""Levels of torch.func in a graph, replayed at another depth than they were written for."""

from __future__ import annotations

from shardfn.capture.levels import ENTERS, LEAVES, NAMES, Nesting


def test_a_written_level_is_the_current_one_of_its_place() -> None:
    nesting = Nesting(base=1)
    real = iter((7, 9))
    enter = lambda *_: next(real)
    assert nesting.call(enter, "_grad_increment_nesting", (), {}) == 7
    assert nesting.call(enter, "_vmap_increment_nesting", (), {}) == 9
    assert nesting.depth == 3
    wrap = lambda x, level: (x, level)
    assert nesting.call(wrap, "_wrap_for_grad", ("x", 2), {}) == ("x", 7)
    batch = lambda x, dim, level: (x, dim, level)
    assert nesting.call(batch, "_add_batch_dim", ("x", 0, 3), {}) == ("x", 0, 9)


def test_levels_end_in_the_order_in_which_they_began() -> None:
    nesting = Nesting(base=0)
    for level, name in enumerate(
        ("_grad_increment_nesting", "_vmap_increment_nesting"), 1
    ):
        nesting.call(lambda *_, n=level: n, name, (), {})
    nesting.call(lambda: None, "_vmap_decrement_nesting", (), {})
    assert nesting.levels == [1]
    nesting.call(lambda: None, "_grad_decrement_nesting", (), {})
    assert nesting.depth == 0


def test_there_is_one_level_of_dual_numbers() -> None:
    nesting = Nesting(base=0)
    assert nesting.call(None, "_enter_dual_level", (), {}) == 0
    assert nesting.call(None, "_exit_dual_level", (0,), {}) is None


def test_every_way_in_has_a_way_out() -> None:
    assert (
        {n.replace("increment", "decrement") for n in ENTERS}
        == set(LEAVES)
        < NAMES
    )
