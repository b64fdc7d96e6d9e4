"""Checks of a transform's options, word for word."""

from __future__ import annotations

import pytest

import shardfn as sf
from shardfn.transforms._options import check_flag, check_function


@pytest.mark.parametrize("value", [0, 1, None, "True"])
def test_a_flag_is_true_or_false(value: object) -> None:
    check_flag("f", "has_aux", True)
    with pytest.raises(sf.ShardError) as caught:
        check_flag("f", "has_aux", value)
    text = str(caught.value)
    assert text.startswith(f"f, has_aux: has_aux is {value!r}\n")
    assert "try: has_aux=True or has_aux=False" in text


def test_a_transform_takes_a_function() -> None:
    check_function("grad", abs)
    check_function("grad", type("Callable", (), {"__call__": abs})())
    with pytest.raises(sf.TreeError) as caught:
        check_function("vmap", [abs], ", in_axes")
    text = str(caught.value)
    assert text.startswith("vmap: a list\n") and "try: vmap(fn, in_axes)" in text
