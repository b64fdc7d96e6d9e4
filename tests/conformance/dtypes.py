"""The operators in every dtype that they take: op by op, compiled, and sharded."""

from __future__ import annotations

import operator
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from typing import Any

import attrs
import torch

import shardfn as sf
from conformance import calls, judge
from conformance.calls import Call
from conformance.judge import Verdict
from shardfn.errors import ShardError

MESH = (3,)
TOGETHER = 48  # calls in one compilation
WHOLE = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
BROKEN = ("bfloat16", "float16", "float32", "float64", "complex32", "complex64", "complex128")
ALL = WHOLE + BROKEN


@attrs.frozen(eq=False)
class Case:
    """A call with what torch makes of it."""

    call: Call
    wanted: tuple[torch.Tensor, ...]


def verdicts(names: Sequence[str], dtypes: Sequence[str], most: int) -> Iterator[Verdict]:
    """Everything about some operators in some dtypes: op by op, sharded, and compiled together."""
    waiting: list[Case] = []
    for name in names:
        for case in cases(name, dtypes, most):
            verdict = op_by_op(case)
            yield verdict
            if verdict.what == judge.NATIVE:
                yield from sharded(case)
                waiting.append(case)
        if len(waiting) >= TOGETHER:
            yield from compiled(waiting)
            waiting = []
    yield from compiled(waiting)


def cases(name: str, dtypes: Sequence[str], most: int) -> Iterator[Case]:
    """The calls of an operator in each of some dtypes, but for those that torch cannot compute
    or that draw random numbers.
    """
    op = calls.entries()[name]
    for text in dtypes:
        dtype = getattr(torch, text)
        if dtype not in op.supported_dtypes("cpu"):
            continue
        try:
            every = list(calls.calls(name, op, calls.MOST, dtype))
        except Exception:  # the database makes no such samples
            continue
        every.sort(key=elements, reverse=True)
        for call in every[:most]:
            wanted = true_results(call)
            if wanted is not None:
                yield Case(call, wanted)


def elements(call: Call) -> int:
    """How many elements the arguments of a call have: kernels of vectors need some."""
    return sum(x.numel() for x in call.tensors)


def true_results(call: Call) -> tuple[torch.Tensor, ...] | None:
    """What torch makes of a call; None if it cannot, or makes something else each time."""
    try:
        results = []
        for seed in range(8):  # two draws of few choices may be the same
            sf.random.state.seed(seed)
            torch.manual_seed(seed)
            found = call.fn(*(x.clone() for x in call.tensors))
            results.append(tuple(x.detach().clone() for x in found))
    except Exception:
        return None
    first, *others = results
    is_unset = call.name.split(".")[0] in judge.UNSET
    is_plain = all(x.layout == torch.strided for x in (*call.tensors, *first))
    is_drawn = not all(is_same(a, b) for other in others for a, b in zip(first, other, strict=True))
    if is_unset or not is_plain or is_drawn:
        return None
    return first


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, no numbers included."""
    return a.shape == b.shape and torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all().item()


def wrong(case: Case, got: Sequence[torch.Tensor]) -> str:
    """How results differ from torch's; empty if they do not."""
    if len(got) != len(case.wanted):
        return f"{len(got)} results, not {len(case.wanted)}"
    for k, (mine, true) in enumerate(zip(got, case.wanted, strict=True)):
        kinds = (mine.shape, mine.dtype), (true.shape, true.dtype)
        if kinds[0] != kinds[1]:
            return f"result {k}: {kinds[0]}, not {kinds[1]}"
        bound = judge.tolerance_of((true, *case.call.tensors), true)
        apart = ~torch.isclose(*map(widened, (mine, true)), rtol=bound, atol=bound, equal_nan=True)
        if apart.any():
            at = tuple(apart.nonzero()[0].tolist())
            return f"result {k} at {at}: {mine[at].item()}, not {true[at].item()}"
    return ""


def widened(x: torch.Tensor) -> torch.Tensor:
    """A tensor in a dtype that can be compared."""
    if x.is_complex():
        return x.to(torch.complex128)
    return x.to(torch.float64) if x.is_floating_point() else x


def op_by_op(case: Case) -> Verdict:
    """A call under `jit`, without a compilation."""
    name = f"{case.call}, backend aten"
    try:
        got = sf.jit(case.call.fn, backend="aten")(*case.call.tensors)
    except ShardError as error:
        return Verdict(judge.REFUSED, "value", name, str(error))
    except Exception as error:
        return Verdict(judge.CRASHED, "value", name, judge.said(error))
    said = wrong(case, got)
    return Verdict(judge.WRONG if said else judge.NATIVE, "value", name, said)


def sharded(case: Case) -> Iterator[Verdict]:
    """A call on the ranks of a mesh, each of its tensors sharded on each of its dims in turn."""
    call = case.call
    name = f"{call}, value"
    try:
        captured = judge.captured(call.fn, call, *call.tensors)
    except ShardError:  # `op_by_op` says why
        return
    ready = judge.Ready(call, "value", captured, call.tensors, case.wanted)
    for marks in judge.placements(ready, MESH):
        yield judge.judged(ready, marks, MESH, name)


def compiled(every: Sequence[Case]) -> Iterator[Verdict]:
    """Calls under `jit`, compiled together; in halves where that fails, or kills the process."""
    if not every:
        return
    found = in_process(_compiled, every)
    if isinstance(found, list):
        yield from found
    elif len(every) == 1:
        yield Verdict(judge.CRASHED, "value", f"{every[0].call}, backend inductor", found)
    else:
        half = len(every) // 2
        yield from compiled(every[:half])
        yield from compiled(every[half:])


def _compiled(every: Sequence[Case]) -> list[Verdict]:
    counts = [len(case.call.tensors) for case in every]

    def together(*xs: torch.Tensor) -> list[list[torch.Tensor]]:
        results, at = [], 0
        for case, n in zip(every, counts, strict=True):
            results.append(case.call.fn(*xs[at : at + n]))
            at += n
        return results

    tensors = [x for case in every for x in case.call.tensors]
    results = sf.jit(together)(*tensors)
    verdicts = []
    for case, got in zip(every, results, strict=True):
        said = "" if is_nearer(case, got) else wrong(case, got)
        what = judge.WRONG if said else judge.NATIVE
        verdicts.append(Verdict(what, "value", f"{case.call}, backend inductor", said))
    return verdicts


def is_nearer(case: Case, got: Sequence[torch.Tensor]) -> bool:
    """Whether results in 16 bits are nearer to those in float32 than torch's own: compiled code
    rounds less often.
    """
    wide = lambda x: x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    if not all(wide(x) is not x for x in case.wanted):
        return False
    true = case.call.fn(*map(wide, case.call.tensors))
    apart = lambda x, y: (wide(x) - y).abs().max().item() if y.numel() else 0.0
    farthest = lambda xs: [apart(x, y) for x, y in zip(xs, true, strict=True)]
    return all(map(operator.le, farthest(got), farthest(case.wanted)))


def in_process(work: Callable[..., Any], *args: Any) -> Any:
    """The result of work in a process that may die; a text if it raises or dies."""
    mine, theirs = get_context("fork").Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        try:
            theirs.send(work(*args))
        except BaseException as error:
            trace = traceback.format_exc().splitlines()[-1]
            theirs.send(f"{judge.said(error)} {trace}"[:1000])
        finally:
            os._exit(0)
    theirs.close()
    try:
        found = mine.recv()
    except EOFError:
        found = None
    _, status = os.waitpid(pid, 0)
    if found is None:
        return f"the process died of {signal.Signals(os.WTERMSIG(status)).name}"
    return found
