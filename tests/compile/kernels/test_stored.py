"""Which values Inductor stores."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.compile.kernels import op_kinds
from shardfn.compile.kernels.stored import Stored
from tests.support.stages.graphs import graph_of

X = torch.ones(4, 4)


def stored(fn: Any, *args: torch.Tensor) -> list[str]:
    kernels = Stored(graph_of(fn, *args), {}).kernels
    return [op_kinds.name(x) for kernel in kernels for x in kernel.writes]


def test_a_formula_is_stored_for_a_product_and_not_for_another_formula() -> None:
    assert stored(lambda x: [torch.relu(torch.sin(x))], X) == ["relu"]
    assert stored(lambda x: [torch.relu(torch.sin(x)) @ x], X) == ["relu", "mm"]


def test_what_two_formulas_read_is_stored_if_it_is_heavy() -> None:
    both = lambda op: lambda x: [(y := op(x)) + 1, (y * 2).sum(0)]
    assert stored(both(torch.relu), X) == ["sum", "add"]
    assert stored(both(torch.exp), X) == ["exp", "sum", "add"]


def test_a_result_that_a_donated_argument_takes_has_no_memory() -> None:
    graph = graph_of(lambda x: [x + 1], X)
    (kernel,) = Stored(graph, {0: 0}).kernels
    assert kernel.writes == () and len(kernel.reads) == 1


def test_parts_of_a_buffer_are_written_into_it() -> None:
    found = Stored(graph_of(lambda x: [torch.cat([x @ x, torch.sin(x)])], X), {})
    homes = {op_kinds.name(x): op_kinds.name(y) for x, y in found.home.items()}
    assert homes["mm"] == homes["sin"] == homes["cat"] == "cat"


def read_twice(xs: Any) -> Any:
    y = sum(xs)
    return [y + 1, (y * 2).sum(0)]


def test_a_formula_of_many_values_is_stored_for_two_readers_and_of_more_for_one() -> None:
    values = [X + k for k in range(14)]
    kernels = lambda fn, n: stored(lambda *xs: fn(xs), *values[:n])
    assert kernels(read_twice, 4) == ["sum", "add"]
    assert kernels(read_twice, 5) == ["add", "sum", "add"]
    once = lambda xs: [sum(xs) * 2]
    assert kernels(once, 12) == ["mul"]
    assert "add" in kernels(once, 14)


def test_of_a_formula_and_its_view_only_the_view_is_stored_for_products() -> None:
    read = lambda x: torch.relu(x).view(2, 8)
    assert stored(lambda x: [(v := read(x)) @ v.t(), v.t() @ v], X)[0] == "view"


def test_a_buffer_of_parts_is_no_part_of_another_one() -> None:
    nested = lambda x: [torch.cat([torch.cat([x + 1, x]), x])]
    found = Stored(graph_of(nested, X), {})
    inner, outer = (x for x in found.home if op_kinds.name(x) == "cat")
    assert found.home[inner] is inner and found.home[outer] is outer


def test_a_pool_is_a_formula_unless_its_windows_are_large() -> None:
    image = torch.ones(1, 1, 12, 12)
    pool = lambda n: lambda x: [torch.nn.functional.avg_pool2d(x.sin(), n) + 1]
    assert stored(pool(2), image) == ["add"]
    assert stored(pool(6), image) == ["sin", "avg_pool2d", "add"]


def test_a_pool_reads_every_element_of_its_window() -> None:
    image, other = torch.ones(1, 1, 12, 12), torch.ones(1, 1, 6, 6)
    pool = torch.nn.functional.avg_pool2d
    fn = lambda x, y: read_twice([pool(x, 2), y])
    assert stored(fn, image, other) == ["add", "add", "sum"]


def test_random_bits_are_stored_as_they_are_long_to_compute() -> None:
    bits = torch.ops.shardfn.random_bits.default
    seed = torch.zeros(3, dtype=torch.int64)
    fn = lambda seed: [bits(seed, None, [4, 4], [4, 1], 0, 0, torch.float32) + 1]
    assert stored(fn, seed) == ["random_bits", "add"]
