"""The picture is written, and a difference of zero can be drawn."""

import pytest

from shardfn_demo import picture
from shardfn_demo.runs import Run

pytest.importorskip("matplotlib")


def test_the_picture_is_a_png(tmp_path):
    done = [
        Run(name, (3.0, 2.0, last), 1.0, 0.1)
        for name, last in (("one", 1.0), ("two", 1.0), ("three", 1.00001))
    ]
    picture.draw(done, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
