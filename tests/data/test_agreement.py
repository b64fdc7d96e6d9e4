"""The error for ranks that read other batches, of more ranks than two."""

from shardfn.data.agreement import BATCH, END, FAILED, different


def test_the_ranks_are_named() -> None:
    ranks = (0, 2, 4)
    row = [BATCH, 3, 0, 0]
    error = different(ranks, [row, [END, 3, 0, 0], row], [""] * 3)
    assert str(error).startswith("loader, batch 3: it exists on ranks 0, 4, and not on rank 2\n")
    error = different(ranks, [row, [FAILED, 3, 0, 0], row], ["", "OSError: x", ""])
    assert str(error).startswith("loader, batch 3: rank 2: OSError: x\n")
    error = different(ranks, [row, row, [BATCH, 3, 1, 0]], ["int64[2]"] * 3)
    assert str(error).startswith("loader, batch 3: ranks 0 and 4 read other values: int64[2]\n")
