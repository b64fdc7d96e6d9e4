"""One more run of a function that could not be read. Python runs it on fake tensors, so that an
exception of the user's arrives as it is, with the user's frames.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ... import _compat, _tree
from ...errors import ShardError, is_inside, is_ours, source_at
from ...tracebacks import note_users, user_frames
from ..closure.closed_over_tensors import arrays_of, modules_of
from ..refusals import leaked_values

LARGE = 2**20  # elements, from which on a tensor that stands for another has the memory of one

AMBIGUOUS = "Boolean value of Tensor with "  # begins torch's error for a branch on many elements
OF_AUTOGRAD = torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward
RAISES = ("RAISE_VARARGS", "RERAISE")


class EagerMode(TorchFunctionMode):
    """A mode of fake tensors in which a call of torch fails as it does on tensors with values.

    Args:
        failed: the error that the program had when it ran, if fake tensors do not have it. Then
            each call is made on tensors with values too.
    """

    def __init__(self, failed: Exception | None = None) -> None:
        super().__init__()
        self.is_wanted = None if failed is None else has_text_of(failed)
        self.entered: list[Any] = []  # the frames of loops, whose bodies run once

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        frame = sys._getframe(1)
        is_asked = func is torch.Tensor.__bool__ and args[0].numel() == 1
        if is_asked and is_inside(frame.f_code.co_filename):
            is_first = frame not in self.entered
            self.entered.append(frame)
            return is_first
        if is_asked and (passed := _compat.check_passed(frame)) is not None:
            return passed
        is_users = not is_ours(frame.f_code.co_filename)  # a derivative of ours calls it too
        if func is torch.Tensor.requires_grad_ and is_users and _compat.inside_transform():
            raise OnlyFake  # torch.func refuses it, where a capture does not
        if func is torch.Tensor.__deepcopy__:
            raise OnlyFake
        out = failed = None
        try:
            with _compat.requires_grad_allowed():
                out = _compat.on_fakes(func)(*args, **kwargs)
        except Exception as error:
            failed = error
        # outside of the `except`, for the error of this call has no other context
        if failed is not None:
            if not isinstance(failed, (_compat.DATA_DEPENDENT, _compat.DYNAMIC_SHAPE)):
                if user_frames(failed.__traceback__) or _is_of_binding(failed):
                    raise failed  # of code of the user's that torch has called
                if func not in OF_AUTOGRAD:
                    self.with_values(func, args, kwargs, _zeros_like)
                elif not _compat.inside_transform():
                    raise failed  # zeros have no history
            raise OnlyFake from failed
        if self.is_wanted is not None:
            try:
                self.with_values(func, args, kwargs, _few_zeros)
            except Exception as error:
                if self.is_wanted(error):
                    raise
        return out

    def with_values(self, func: Any, args: Any, kwargs: Any, make: Callable[..., Any]) -> None:
        """Make a call on tensors with values."""
        with _compat.values():
            args, kwargs = _tree.map_held(make, (args, kwargs))
            func(*args, **kwargs)


class OnlyFake(Exception):
    """An error that only fake tensors have."""


def _zeros_like(x: Any) -> Any:
    """A tensor of zeros like one without values."""
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        return x
    if x.numel() > LARGE:
        made = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
    else:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_()
    made = made.conj() if x.is_conj() else made  # some views of a lazy conjugate are errors
    made = torch.ops.aten._neg_view(made) if x.is_neg() else made
    is_parameter = isinstance(x, torch.nn.Parameter)
    return torch.nn.Parameter(made, requires_grad=False) if is_parameter else made


def _few_zeros(x: Any) -> Any:
    """A tensor of zeros like one without values, with few elements."""
    if not isinstance(x, torch.Tensor) or x.numel() <= LARGE:
        return _zeros_like(x)
    return torch.zeros([min(n, 2) for n in x.shape], dtype=x.dtype, device=x.device)


def raise_users(
    name: str,
    fn: Callable[..., Any],
    call: Callable[[], Any],
    is_users: Callable[[Exception], bool],
    failed: Exception | None = None,
) -> None:
    """Run a function as Python does, and raise its error if it is the user's.

    Args:
        name: of the function, for the note.
        fn: the function.
        call: calls it, on fake tensors.
        is_users: whether an error is the user's.
        failed: the error that its program had when it ran.
    """
    try:
        with (
            _compat.reading(),
            _compat.uncompiled(),
            _compat.patched("again", checkpointed=contextlib.nullcontext),
            _modules_kept(fn),
            _compat.WithoutEffects(OnlyFake),
            EagerMode(failed),
        ):
            leaked_values.watch(name, fn)
            call()
    except BaseException as error:
        if isinstance(error, Exception) and not is_users(error):
            return
        _named_plainly(error)
        note_users(error, name)
        raise


def is_users_error(error: Exception, line: str | None, *, is_known: bool) -> bool:
    """Whether an error is of the user's code.

    Args:
        error: the error.
        line: the only line that it may come from, `file:line`, or None.
        is_known: whether there is another reason to stop there. Then it is the user's if a
            `raise` or an `assert` has raised it, or a branch on a tensor of many elements.
    """
    if isinstance(error, (ShardError, OnlyFake)) or _compat.is_of_tracing(error):
        return False
    if _is_of_binding(error):
        return not is_known
    frames = [(f.f_code, n) for f, n in traceback.walk_tb(error.__traceback__)]
    own = [(code.co_filename, n) for code, n in frames if not _is_around(code)]
    if not own or is_inside(own[-1][0]) or line not in (None, source_at(*own[-1])):
        return False
    return not is_known or _is_raised(error) or str(error).startswith(AMBIGUOUS)


def _is_around(code: types.CodeType) -> bool:
    """Whether code belongs to torch or to shardfn, not to the user."""
    file = code.co_filename
    if is_inside(file):
        is_of_names = "/public/" in file  # a misspelled one is not found there
        is_of_modes = "/_compat/" in file or code.co_name.startswith("__torch_")
        return is_of_names or is_of_modes or file == __file__
    return is_ours(file)


def _is_of_binding(error: Exception) -> bool:
    """Whether a function of the user's cannot take the arguments that shardfn calls it with, such
    as a body of a loop with too few parameters. Python raises that in the frame of the call.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not (isinstance(error, TypeError) and frames and is_ours(frames[-1].f_code.co_filename)):
        return False
    held = list(frames[-1].f_locals.values())
    transformed = [x for x in held if type(x).__module__.startswith("shardfn.")]
    functions: list[Any] = [
        fn
        for fn in (*held, *[getattr(x, "fn", None) for x in transformed])
        if isinstance(fn, types.FunctionType) and not is_ours(fn.__code__.co_filename)
    ]
    return any(str(error).startswith(f"{fn.__qualname__}() ") for fn in functions)


def _is_raised(error: Exception) -> bool:
    """Whether a `raise` or an `assert` of the user's has raised an error."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or is_ours(last.tb_frame.f_code.co_filename):
        return False
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] in RAISES


def has_text_of(failed: Exception) -> Callable[[Exception], bool]:
    """A test whether an error has the same text as another one."""
    said = str(failed)
    return lambda error: bool(str(error)) and str(error) in said


def _named_plainly(error: BaseException) -> None:
    """Replace FakeTensor by Tensor in the text of an error."""
    error.args = tuple(
        x.replace("FakeTensor", "Tensor") if isinstance(x, str) else x for x in error.args
    )


@contextlib.contextmanager
def _modules_kept(fn: Callable[..., Any]) -> Iterator[None]:
    """A context that restores the attributes of the modules that a function closes over, and its
    arrays.
    """
    arrays = [(x, x.copy()) for x in arrays_of(fn) if x.flags.writeable]
    parts = {part for module in modules_of(fn) for part in module.modules()}
    tables = [vars(part) for part in parts]
    tables += [x for table in tables for x in table.values() if type(x) is dict]
    before = [dict(table) for table in tables]
    try:
        with _compat.made_by_hooks(parts):
            yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)
        for array, numbers in arrays:
            array[...] = numbers
