"""Texts between ranks: of any length, empty, and beyond ASCII."""

from __future__ import annotations

import torch.distributed as dist
from ranks import run_ranks

from shardfn.training.checkpoints.texts import Texts

SENT = ("", "é" * 3, "x" * 70_000)


def _exchanged() -> tuple[list[str], str]:
    texts = Texts(dist.group.WORLD)
    came = texts.gather(SENT[dist.get_rank()])
    return came, texts.scatter(list(reversed(SENT)) if came else [])


def test_the_first_rank_hears_all_and_answers_each() -> None:
    first, *others = run_ranks(3, _exchanged)
    assert first == (list(SENT), SENT[2])
    assert others == [([], SENT[1]), ([], SENT[0])]


def test_a_process_alone() -> None:
    assert Texts().gather("x") == ["x"]
    assert Texts().scatter(["y"]) == "y"
