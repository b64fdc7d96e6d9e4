"""Samples tell batches apart."""

import pytest
import torch
from message import without_line

import shardfn as sf
from shardfn.training.data import samples

ONE = {"x": torch.ones(2, 3)}


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(2, 3)},
        {"y": torch.ones(2, 3)},
        {"x": torch.ones(3, 2)},
        {"x": torch.ones(2, 3, dtype=torch.float64)},
        {"x": torch.ones(2, 3), "y": 1},
    ],
    ids=["value", "path", "shape", "dtype", "leaf"],
)
def test_trees_that_differ(other: object) -> None:
    assert samples.of_tree(ONE, 0) == samples.of_tree({"x": torch.ones(2, 3)}, 0)
    assert samples.of_tree(ONE, 0) != samples.of_tree(other, 0)
    assert samples.of_tree(ONE, 0) != samples.of_tree(ONE, 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int64])
def test_every_dtype(dtype: torch.dtype) -> None:
    large = torch.ones(5000, dtype=dtype)
    one = large.clone()
    one[1] = 0
    assert samples.of_tree(large, 0) != samples.of_tree(one, 0)
    assert isinstance(samples.of_tree(torch.ones((), dtype=dtype), 0), int)


def test_a_run_on_other_data_is_refused() -> None:
    samples.check_resumed(2, 2, 5, 5)
    rest = (
        "\n  needed: the same data, batch size and order\n  try: use a sampler that draws "
        "from torch's generators, and a state_dict() of the same data"
    )
    with pytest.raises(sf.CheckpointError) as error:
        samples.check_resumed(2, 2, 5, 6)
    assert without_line(error.value) == (
        (
            "loader, after load_state_dict: the first 2 batches differ from those that the saved "
            "run read"
        )
        + rest
    )
    with pytest.raises(sf.CheckpointError) as error:
        samples.check_resumed(1, 2, 5, 5)
    assert without_line(error.value) == (
        "loader, after load_state_dict: the data have 1 batches, but the saved run has read 2"
        + rest
    )
