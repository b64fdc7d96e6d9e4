"""Lines and modules as text."""

from __future__ import annotations

import pytest

from shardfn.errors import PlacementError
from shardfn.source_text import joined_paths, located, located_in_program, shape_of_path

LINE = "/home/a/model.py:41"


def test_a_module_stands_before_the_line_and_a_plain_line_stays_as_it_is() -> None:
    assert located(LINE, "layers.0.up") == "layers.0.up (model.py:41)"
    assert located(LINE, "layers.0.up", full=True) == f"layers.0.up ({LINE})"
    assert located(LINE, None) == located(LINE, None, full=True) == LINE
    assert located(None, "up") == "up"
    assert located(None, None) == ""
    assert located_in_program(LINE, None) == "model.py:41"
    assert located_in_program(LINE, "up") == "up (model.py:41)"
    assert located("Cell In[3], line 2", "up") == "up (Cell In[3], line 2)"


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        ([], ""),
        (["up"], "up"),
        (["layers.7.up", "layers.7.up"], "layers.7.up"),
        (["layers.10.up", "layers.9.up"], "layers.9-10.up"),
        (["layers.0.up", "layers.2.up"], "layers.*.up"),
        (["layers.0.experts.1.up", "layers.1.experts.0.up"], "layers.0-1.experts.0-1.up"),
    ],
)
def test_paths_of_equal_modules_are_written_as_one(paths: list[str], text: str) -> None:
    assert joined_paths(paths) == text
    assert len(set(map(shape_of_path, paths))) <= 1


def test_paths_of_other_modules_have_another_shape() -> None:
    assert shape_of_path("layers.0.up") != shape_of_path("layers.0.down")
    assert shape_of_path(None) is None


def test_an_error_names_the_module_beside_its_line() -> None:
    error = PlacementError.of("shard(f)", "got", fix="that", source=LINE, module="layers.0.up")
    assert str(error) == f"shard(f): got\n  at: layers.0.up ({LINE})\n  try: that"
    assert (error.source, error.module) == (LINE, "layers.0.up")
    later = PlacementError.of("shard(f)", "got", fix="that")
    later.locate(LINE, "layers.0.up")
    assert str(later) == str(error) and later.module == "layers.0.up"
