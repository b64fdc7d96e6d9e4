"""Warnings of expensive programs: each names a placement that mends it, and programs that are
sharded as textbooks say have none.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from tests.transforms.sharding.test_auto import (
    SMALL,
    STACKED,
    language_model,
    layered,
    loss,
    sgd,
    shapes,
)

STEP = sgd(loss)
GRAD = sf.grad(language_model)
LANGUAGE = shapes(emb=(1000, 512), up=(512, 2048), down=(2048, 512), head=(512, 1000))
TOKENS = sf.ShapeDtype((128, 128), torch.int64)


def said(fn: Any, args: Any, shape: Any, names: Any, places: Any, **options: Any) -> list[str]:
    """The warnings of two lowerings."""
    with sf.fake_world(8, numerics=False), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        sharded = sf.shard(fn, sf.make_mesh(shape, names), places, **options)
        sharded.lower(*args)
        sharded.lower(*args)
    return [str(warning.message) for warning in seen]


def layers(up: P, down: P) -> dict[str, P]:
    return {"up": up, "down": down}


TEXTBOOK: dict[str, tuple[Any, Any, Any]] = {
    "data parallel": ((8,), ("dp",), (P(), P("dp"))),
    "fully sharded": ((8,), ("dp",), (P("dp"), P("dp"))),
    "tensor parallel": ((8,), ("tp",), (layers(P(None, "tp"), P("tp")), P())),
    "data and tensor parallel": ((4, 2), ("dp", "tp"), (layers(P(None, "tp"), P("tp")), P("dp"))),
    "fully sharded and tensor parallel": (
        (4, 2),
        ("dp", "tp"),
        (layers(P("dp", "tp"), P("tp", "dp")), P("dp")),
    ),
}


@pytest.mark.parametrize("name", TEXTBOOK)
def test_textbook_programs_are_not_called_expensive(name: str) -> None:
    assert said(STEP, SMALL, *TEXTBOOK[name]) == []


STACKED_PLACES = {
    "fully sharded": ((8,), ("dp",), (P(None, "dp"), P("dp"))),
    "data and tensor parallel": (
        (4, 2),
        ("dp", "tp"),
        (layers(P(None, None, "tp"), P(None, "tp")), P("dp")),
    ),
}


@pytest.mark.parametrize("name", STACKED_PLACES)
def test_textbook_scans_are_not_called_expensive(name: str) -> None:
    assert said(sgd(layered), STACKED, *STACKED_PLACES[name]) == []


def test_replicated_compute_in_a_scan_is_warned_of_with_its_line_and_a_placement() -> None:
    places = (4, 2), ("dp", "tp"), (P(), P("dp"))
    (text,) = said(sgd(layered), STACKED, *places)
    first, source, fix = text.splitlines()
    assert "100% of a rank's FLOPs are computed replicated by all 2 ranks of tp" in first
    assert source.startswith(f"  at: {layered.__code__.co_filename}:")
    assert fix == "  try: batch[0] at P(('dp', 'tp')) in place of P('dp')"


def test_implicit_transfers_of_a_branch_are_warned_of_with_a_placement() -> None:
    fn = lambda p, x: sf.cond(x.sum() > 0, lambda x: loss(p, x), torch.sum, x)
    args = SMALL[0], sf.ShapeDtype((65536, 512))
    places = (8,), ("dp",), (P(), P(None, "dp"))
    sends, *_ = said(fn, args, *places, planner="greedy")
    first, _, fix = sends.splitlines()
    assert "112.0 MiB of activations in implicit collectives" in first
    assert "most of them by all_gather over dp for mm" in first
    assert fix.startswith("  try: x at P('dp') in place of P(None, 'dp')")


def test_an_axis_that_shards_nothing_is_warned_of_with_a_placement() -> None:
    (text,) = said(STEP, SMALL, (4, 2), ("dp", "tp"), (P(), P("dp")))
    first, source, fix = text.splitlines()
    assert first == (
        "shard(step): 100% of a rank's FLOPs are computed replicated by all 2 ranks of tp, most of "
        "them by mm"
    )
    assert source.startswith(f"  at: {loss.__code__.co_filename}:")
    assert fix == "  try: p['up'] at P(None, 'tp') in place of P()"


def test_activations_that_another_placement_does_not_send_are_warned_of() -> None:
    params = LANGUAGE
    places = dict.fromkeys(params, P(None, "dp")), P("dp")
    args = params, TOKENS
    (text,) = said(GRAD, args, (8,), ("dp",), places, planner="greedy")
    first, source, fix = text.splitlines()
    assert first.startswith("shard(grad(language_model)): a rank sends 1")
    assert "MiB of activations in implicit collectives" in first
    assert "test_auto.py:" in source
    assert fix.startswith("  try: p['emb'] at P('dp') in place of P(None, 'dp'), with which")
    assert said(GRAD, args, (8,), ("dp",), places) == []  # planned


def test_implicit_transfers_without_a_better_placement_are_warned_of_with_their_bytes() -> None:
    """Turned around along both dims: one of them has to be exchanged."""

    def crossed(x: torch.Tensor) -> torch.Tensor:
        return x.flip(1).flip(0)

    (text,) = said(crossed, (sf.ShapeDtype((65536, 65536)),), (8,), ("dp",), (P("dp"),))
    assert (
        "1.8 GiB" in text and "no other placement of one argument reduces the communication" in text
    )


def test_small_programs_are_never_expensive() -> None:
    small = shapes(up=(8, 16), down=(16, 8)), sf.ShapeDtype((32, 8))
    assert said(STEP, small, (4, 2), ("dp", "tp"), (P(), P("dp"))) == []
