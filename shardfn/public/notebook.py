"""`%load_ext shardfn`: the magic `%program` shows what a call in a notebook would run."""

from __future__ import annotations

import ast
import functools
from typing import Any

from ..errors import ShardError

USE = "%program step(params, batch)"


def load_ipython_extension(shell: Any) -> None:
    """Add the magic `%program` to a notebook. IPython calls it at `%load_ext shardfn`.

    Args:
        shell: the running IPython.
    """
    shell.register_magic_function(functools.partial(program, shell), "line_cell", "program")


def program(shell: Any, line: str, cell: str | None = None) -> None:
    """Print the program of the last call of a line or a cell. The call does not run.

    Args:
        shell: the running IPython.
        line: the text after `%program`.
        cell: the text below `%%program`. What stands before its last call is run.

    Raises:
        ShardError: the last line is not a call of a transformed function.
    """
    text = line if cell is None else cell
    last = _last_call(text)
    before = "\n".join(text.splitlines()[: last.lineno - 1])
    if before.strip() and not shell.run_cell(before).success:
        return  # IPython has shown the error
    names = shell.user_ns
    fn = eval(compile(ast.Expression(last.func), USE, "eval"), names)
    if not hasattr(fn, "lower"):
        raise _refused(f"{ast.unparse(last.func)} is a {type(fn).__name__}")
    lower = ast.Attribute(last.func, "lower", ast.Load())
    call = ast.Call(lower, last.args, last.keywords)
    whole = ast.fix_missing_locations(ast.Expression(call))
    print(eval(compile(whole, USE, "eval"), names))


def _last_call(text: str) -> ast.Call:
    """The call that is the last statement of a text."""
    lines = ast.parse(text).body
    last = lines[-1].value if lines and isinstance(lines[-1], ast.Expr) else None
    if not isinstance(last, ast.Call):
        got = ast.unparse(lines[-1]).splitlines()[0] if lines else "nothing"
        raise _refused(f"the last line is {got!r}")
    return last


def _refused(got: str) -> ShardError:
    needed = "a call of a function that sf.shard, sf.jit or another transform returned"
    return ShardError.of("%program", got, needed=needed, fix=USE)
