"""A loss over a vocabulary that is cut: equal to one device, and what is sent grows with the
tokens, not with the words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import equal

import shardfn as sf
from shardfn import P

TOKENS, WIDTH, IGNORED = 6, 5, 2
FLOAT = 8  # bytes
LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "some ignored": {"ignore_index": IGNORED},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed, some ignored": {"ignore_index": IGNORED, "label_smoothing": 0.1},
}
WORDS = {2: (8, 7), 3: (7, 11), 4: (11, 9)}  # 9 words over 4 ranks: the last has none


@functools.cache  # one function for all meshes, which share its captures
def loss(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda x, head, target: F.cross_entropy(x @ head, target, **options)


def attend(x: torch.Tensor, head: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ head, -1) @ values


def attended(*args: torch.Tensor) -> torch.Tensor:
    return attend(*args).square().sum()


def f(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


def arguments(words: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    target = torch.randint(0, words, (TOKENS,), generator=torch.Generator().manual_seed(words))
    target[1] = IGNORED
    return f(TOKENS, WIDTH), f(WIDTH, words), target


def over_words(fn: Callable[..., Any], n: int, last: Any = None) -> Any:
    return sf.shard(
        fn, sf.make_mesh((n,), ("tp",)), (P(), P(None, "tp"), last or P()), backend="aten"
    )


@pytest.mark.parametrize("n", list(WORDS))
@pytest.mark.parametrize("name", list(LOSSES))
def test_cross_entropy_over_a_cut_vocabulary_equals_one_device(name: str, n: int) -> None:
    gradient = sf.value_and_grad(loss(**LOSSES[name]), argnums=(0, 1))
    for words in WORDS[n]:
        args = arguments(words)
        with sf.fake_world(n):
            equal(sf.full(over_words(gradient, n)(*args)), gradient(*args))


@pytest.mark.parametrize("name", list(LOSSES))
def test_cross_entropy_over_cut_words_and_a_cut_batch_equals_one_device(name: str) -> None:
    gradient, args = (sf.value_and_grad(loss(**LOSSES[name]), argnums=(0, 1)), arguments(7))
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        fn = sf.shard(gradient, mesh, (P("dp"), P(None, "tp"), P("dp")), backend="aten")
        equal(sf.full(fn(*args)), gradient(*args))
        assert {c.kind for c in fn.lower(*args).collectives} == {"all_reduce"}


def sent(lowered: Any) -> list[tuple[str, str | None, int]]:
    return sorted((c.kind, c.op, c.nbytes) for c in lowered.collectives)


TOKEN = TOKENS * FLOAT  # a number for each token
ACTIVATIONS = (
    "all_reduce",
    "sum",
    TOKENS * WIDTH * FLOAT,
)  # the gradient of the activations, a sum over the words


def test_cross_entropy_sends_a_maximum_two_sums_and_the_loss() -> None:
    rows = [
        ("all_reduce", "max", TOKEN),
        ("all_reduce", "sum", FLOAT),
        ("all_reduce", "sum", TOKEN),
    ]
    gradient = sf.value_and_grad(loss(), argnums=(0, 1))
    for words in (8, 64, 512):
        with sf.fake_world(2):
            assert sent(over_words(loss(), 2).lower(*arguments(words))) == rows
            assert sent(over_words(gradient, 2).lower(*arguments(words))) == sorted(
                [*rows, ("all_reduce", "sum", TOKEN), ACTIVATIONS]
            )


@pytest.mark.parametrize("name", list(LOSSES))
def test_no_rank_ever_holds_a_number_for_every_word(name: str) -> None:
    words = 512
    with sf.fake_world(4):
        low = over_words(sf.value_and_grad(loss(**LOSSES[name]), argnums=(0, 1)), 4).lower(
            *arguments(words)
        )
    made = [n.meta["val"] for n in low.program.graph.nodes if n.op == "call_function"]
    assert (
        max(x.untyped_storage().nbytes() for x in made if isinstance(x, torch.Tensor))
        < TOKEN * words / 2
    )
    assert all(c.nbytes <= TOKENS * WIDTH * FLOAT for c in low.collectives)


@pytest.mark.parametrize("n", list(WORDS))
def test_a_softmax_over_a_cut_dim_sends_a_maximum_and_a_sum_for_each_row(n: int) -> None:
    gradient = sf.value_and_grad(attended, argnums=(0, 1, 2))
    for words in WORDS[n]:
        args = (*arguments(words)[:2], f(words, 3))
        with sf.fake_world(n):
            plain, both = (over_words(attend, n, P("tp")), over_words(gradient, n, P("tp")))
            equal(sf.full(plain(*args)), attend(*args))
            equal(sf.full(both(*args)), gradient(*args))
            rows = [
                ("all_reduce", "max", TOKEN),
                ("all_reduce", "sum", TOKEN),
                ("all_reduce", "sum", TOKENS * 3 * FLOAT),
            ]
            assert sent(plain.lower(*args)) == rows
            assert sent(both.lower(*args)) == sorted(
                [*rows, ("all_reduce", "sum", TOKEN), ACTIVATIONS]
            )


def test_a_softmax_that_is_not_cut_stays_one_op() -> None:
    args = (*arguments(8)[:2], f(8, 3))
    with sf.fake_world(2):
        low = sf.shard(
            attend, sf.make_mesh((2,), ("dp",)), (P("dp"), P(), P()), backend="aten"
        ).lower(*args)
    assert "aten._softmax.default" in {str(n.target) for n in low.program.graph.nodes}
    assert not low.collectives


def test_half_precision_is_added_up_as_on_one_device() -> None:
    x = f(4, 6).bfloat16()
    with sf.fake_world(2):
        fn = sf.shard(
            lambda x: torch.softmax(x, 1),
            sf.make_mesh((2,), ("tp",)),
            P(None, "tp"),
            backend="aten",
        )
        assert {n for _, _, n in sent(fn.lower(x))} == {4 * 4}, "a float32 for each row"
        assert torch.equal(sf.full(fn(x)), torch.softmax(x, 1))
