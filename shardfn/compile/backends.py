"""The two backends: Inductor, and `aten`, which runs the graph op by op."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _compat
from .._compat.block_calls import WithCalls
from ..collectives import custom_collective_ops
from ..ops import higher_order
from ..schedule import copied
from .collective_order import refuse_other_order
from .loops import compile_loops, release_loops
from .native import load_native
from .once import compiled_once, key_of
from .op_by_op import op_by_op
from .recomputed import recompute_cheap_values
from .repeats import known, outline, split_last_calls
from .separate import separate

Runner = Callable[[list[torch.Tensor]], list[torch.Tensor]]  # takes the inputs, empties the list


def aten(graph: torch.fx.GraphModule, donated: Sequence[int] = (), *_: Any) -> Runner:
    """Build a runner that runs the graph op by op, without compilation. Results share memory only
    with donated inputs.
    """
    separate(graph, donated)
    op_by_op(graph.graph)
    function = _compat.function_of(graph)

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            values = list(inputs)
            inputs.clear()
            return function(*values)

    return run


def inductor(
    graph: torch.fx.GraphModule,
    donated: Sequence[int] = (),
    note: Callable[[], None] = lambda: None,
    checked: Sequence[int] = (),
    pairs: dict[int, int] | None = None,
) -> Runner:
    """Compile the graph with Inductor: C++ on CPU, Triton on CUDA. The body of each loop is
    compiled separately, once. Equal graphs are compiled once, also in other processes.

    Results share memory only with donated inputs.

    Args:
        graph: functional ATen, the inputs as placeholders.
        donated: the donated inputs.
        note: counts a compilation.
        checked: the inputs whose layout each call checks.
        pairs: as of `donate`: cheap values are recomputed in the backward, and then results are
            written into donated inputs. None for a graph that is compiled as it is.
    """
    load_native()
    loops = compile_loops(graph, _compile_body)
    is_unshareable = any(x.is_own for x in loops)
    key = None if is_unshareable else key_of(graph.graph, donated, checked, pairs)
    runner = compiled_once(
        key,
        lambda: _run_inductor(_recompute_and_donate(graph.graph, pairs), donated, checked),
        note,
    )
    weakref.finalize(runner, release_loops, loops)
    return runner


def _recompute_and_donate(graph: torch.fx.Graph, pairs: dict[int, int] | None) -> torch.fx.Graph:
    """Recompute cheap values in the backward, and write results into donated inputs. A stored
    compilation does not need this.
    """
    return graph if pairs is None else donate(recompute_cheap_values(graph), pairs)


def _run_inductor(graph: torch.fx.Graph, donated: Sequence[int], checked: Sequence[int]) -> Runner:
    """Compile a graph with Inductor, without looking in a cache. Blocks that repeat are compiled
    once.
    """
    program, kinds = outline(graph)
    last = split_last_calls(program) if kinds else None
    sources = {number: _source(kind.graph) for number, kind in kinds.items()}
    with known(kinds):
        return _compat.inductor(
            _source(program, donated),
            custom_collective_ops(),
            checked,
            sources,
            last.code(kinds) if last else "",
        )


def _source(graph: torch.fx.Graph, donated: Sequence[int] = ()) -> _compat.Source:
    """Return a graph as what Inductor compiles: its results share memory with donated inputs at
    most.
    """
    module = _compat.graph_module(torch.nn.Module(), graph)
    fakes = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    run = WithCalls(higher_order.unbind_graphs(module)).run
    return _compat.Source(run, fakes, lambda lowered: separate(lowered, donated))


def _compile_body(graph: torch.fx.Graph, sums: dict[int, int]) -> Runner:
    """Compile the body of a loop, and check the order of its collectives.

    Args:
        graph: of the body.
        sums: results that are written into the memory of an input, by position.
    """
    module = torch.fx.GraphModule(torch.nn.Module(), copied(graph))
    runner = inductor(module, [*sums.values()], pairs=sums or None)
    if code := _compat.generated_code(runner):
        refuse_other_order("a loop", graph, code)
    return runner


BACKENDS: dict[str, Callable[..., Runner]] = {"aten": aten, "inductor": inductor}


def donate(graph: torch.fx.Graph, pairs: dict[int, int]) -> torch.fx.Graph:
    """Write outputs of a graph into the memory of donated inputs, and return the graph.

    Args:
        graph: a local graph.
        pairs: output position -> input position (among the placeholders) of a donated input of
            the same layout.
    """
    placeholders = graph.find_nodes(op="placeholder")
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    with graph.inserting_before(output):
        for out, argument in pairs.items():
            copy = graph.call_function(
                torch.ops.aten.copy_.default, (placeholders[argument], results[out])
            )
            copy.meta["val"] = placeholders[argument].meta["val"]
            results[out] = copy
    output.args = (results,)
    return graph
