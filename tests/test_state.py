"""State: every module-level object that is written to after import has a row in state.py."""

from __future__ import annotations

import ast
import contextvars
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stagings import counts, forget

import shardfn as sf
from shardfn import state
from shardfn.partition import redistribute
from shardfn.partition.rule_api import registry
from tests.support.reading.source import ROOT, Module, imports, modules, parse

# Made to be written to, whether a write is seen or not.
ALWAYS = {
    "States",
    "Condition", "ContextVar", "Event", "Lock", "RLock", "Semaphore", "WeakIdKeyDictionary",
    "WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "count", "cycle", "local",
}  # fmt: skip
CACHES = {"cache", "lru_cache"}
MUTATORS = {
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert",
    "intersection_update", "move_to_end", "pop", "popitem", "popleft", "remove", "reverse", "send",
    "setdefault", "sort", "subtract", "symmetric_difference_update", "update",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    modules.cache_clear()


def places(found: list[Module]) -> set[str]:
    """Every "module:name" below shardfn that is written to after import."""
    defined = {_place(m.name, name) for m in found for name, _ in _definitions(m)}
    written = {place for m in found for place in _written(m)}
    return {place for m in found for place in _always(m)} | (written & defined)


def _place(module: str, name: str) -> str:
    return f"{module.removeprefix('shardfn').lstrip('.')}:{name}"


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import, also under `if`, `try`, `with` and loops."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(statement, field, [])
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _top(inner)


def _definitions(module: Module) -> Iterator[tuple[str, ast.expr | None]]:
    """The names that a module assigns at import, its classes' attributes too."""
    for statement in _top(module.tree.body):
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        yield part.id, statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement.value


def _always(module: Module) -> Iterator[str]:
    """Objects of classes that are made to be written to, and cached functions."""
    for name, value in _definitions(module):
        if isinstance(value, ast.Call) and _last(value.func) in {*ALWAYS, *CACHES}:
            yield _place(module.name, name)
    for node in ast.walk(module.tree):
        decorators = getattr(node, "decorator_list", [])
        if CACHES & {_last(decorator) for decorator in decorators}:
            yield _place(module.name, node.name)


def _last(expression: ast.expr) -> str:
    """The last name of `functools.lru_cache(maxsize=1)` or `itertools.count`."""
    if isinstance(expression, ast.Call | ast.Subscript):
        inner = expression.func if isinstance(expression, ast.Call) else expression.value
        return _last(inner)
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def _written(module: Module) -> Iterator[str]:
    """What the functions of a module write to: its own names, and those of other modules."""
    known = _names(module)
    for function in _functions(module.tree):
        yield from _written_in(function, known)


def _written_in(function: ast.AST, known: dict[str, str]) -> Iterator[str]:
    """The same for one function and those inside it; its locals hide names of the module."""
    own = list(_own(function))
    rebound = {name for node in own if isinstance(node, ast.Global) for name in node.names}
    local = _locals(function, own) - rebound
    known = {name: place for name, place in known.items() if name not in local}
    for target in _targets(own, rebound):
        place = _resolved(target, known)
        if place is not None:
            yield place
    for inner in _functions(function):
        yield from _written_in(inner, known)


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _functions(parent: ast.AST) -> Iterator[ast.AST]:
    """The functions inside a node, but not those inside them."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, FUNCTIONS):
            yield node
        else:
            yield from _functions(node)


def _own(parent: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    for node in ast.iter_child_nodes(parent):
        yield node
        if not isinstance(node, FUNCTIONS):
            yield from _own(node)


def _locals(function: ast.AST, own: list[ast.AST]) -> set[str]:
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    stored = {
        node.id for node in own if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return arguments | stored


def _names(module: Module) -> dict[str, str]:
    """What a name in a module stands for: a place here, a place elsewhere, or a module."""
    known = {name: _place(module.name, name) for name, _ in _definitions(module)}
    for i in imports(module):
        if i.target.split(".")[0] == "shardfn" and i.name:
            alias = next(a for a in i.node.names if a.name == i.name)
            known[alias.asname or i.name] = _place(i.target, i.name)
    return known


def _targets(own: list[ast.AST], rebound: set[str]) -> Iterator[ast.expr]:
    """The objects that the nodes of a function write to."""
    for node in own:
        if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node.value
            yield node
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in MUTATORS
        ):
            yield node.func.value
        elif isinstance(node, ast.Name) and node.id in rebound:
            yield node


def _resolved(target: ast.expr, known: dict[str, str]) -> str | None:
    """The place of an object: of `_rules`, or of `counts` where cache is a module."""
    while isinstance(target, ast.Subscript):
        target = target.value
    if isinstance(target, ast.Name):
        return known.get(target.id)
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
        owner = known.get(target.value.id)
        return None if owner is None else _place(owner.replace(":", "."), target.attr)
    return None


def test_state_py_lists_all_that_is_written_to_after_import() -> None:
    listed = [f"{row.module}:{row.name}" for row in state.STATE]
    assert sorted(listed) == sorted(places(modules()))


def test_every_row_leads_to_an_object() -> None:
    for row in state.STATE:
        module = importlib.import_module(f"shardfn.{row.module}")
        assert hasattr(module, row.name), row


def test_the_context_variables_are_listed_as_such() -> None:
    for row in state.STATE:
        module = importlib.import_module(f"shardfn.{row.module}")
        is_context = isinstance(getattr(module, row.name), contextvars.ContextVar)
        assert is_context == (row in state.CONTEXTS), row


PLANTED = {
    "a dict that a function writes to": "_seen = {}\ndef f(x):\n    _seen[x] = 1",
    "a list that a function adds to": "_seen: list[int] = []\ndef f(x):\n    _seen.append(x)",
    "a list inside a dict": "_seen = {}\ndef f(x):\n    _seen[x].append(x)",
    "a number under global": "_seen = 0\ndef f():\n    global _seen\n    _seen += 1",
    "a record": "_seen = Record()\ndef f(x):\n    _seen.last = x",
    "an attribute of a class": "class A:\n    _seen = []\n    def f(x):\n        _seen.append(x)",
    "one of two names": "_seen, other = {}, {}\ndef f(x):\n    del _seen[x]",
    "a context variable": "_seen = contextvars.ContextVar('seen')",
    "a counter": "_seen = itertools.count()",
    "locals of a thread": "_seen = threading.local()",
    "a weak dictionary": "_seen: Any = weakref.WeakKeyDictionary()",
    "a cached function": "@functools.lru_cache(maxsize=8)\ndef _seen(x): ...",
    "a function that is cached by a call": "_seen = functools.cache(len)",
    "what is under a condition": "if True:\n    _seen = {}\ndef f(x):\n    _seen.pop(x)",
    "what a lambda writes to": "_seen = set()\nf = lambda x: _seen.add(x)",
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_state_is_found(kind: str) -> None:
    assert places([parse("shardfn.a", Path("a.py"), PLANTED[kind])]) == {"a:_seen"}


def test_a_write_by_another_module_is_found() -> None:
    owner = parse("shardfn.a.b", Path("b.py"), "seen = {}")
    for text in (
        "from .a import b\ndef f(x):\n    b.seen[x] = 1",
        "from .a.b import seen as other\ndef f(x):\n    other.update(x)",
    ):
        writer = parse("shardfn.c", Path("c.py"), text)
        assert places([owner, writer]) == {"a.b:seen"}


@pytest.mark.parametrize(
    "text",
    [
        "TABLE = {1: 2}\ndef f(x):\n    return TABLE[x]",
        "TABLE = {}\nfor n in range(3):\n    TABLE[n] = n",
        "def f(x):\n    seen = []\n    seen.append(x)",
    ],
)
def test_a_table_that_is_only_read_is_no_state(text: str) -> None:
    assert places([parse("shardfn.a", Path("a.py"), text)]) == set()


def filled(found: list[Module]) -> list[str]:
    """Fields of frozen records that start as an empty container, which only a write can fill."""
    return [
        f"{module.at(field)}: {node.name} is frozen, and {ast.unparse(field.target)} is filled"
        for module in found
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        and "frozen" in {_last(decorator) for decorator in node.decorator_list}
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Call)
        for option in field.value.keywords
        if option.arg == "factory" and _last(option.value) in {"list", "dict", "set"}
    ]


def test_no_frozen_record_is_made_to_be_filled() -> None:
    assert not filled(modules())
    text = "@attrs.frozen(eq=False)\nclass A:\n    x: list[int] = attrs.field(factory=list)"
    (line,) = filled([parse("shardfn.a", ROOT / "a.py", text)])
    assert line == "a.py:3: A is frozen, and x is filled"


def test_clear_forgets_programs_and_prices_and_keeps_rules_worlds_and_links() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    entry = registry.Registered(torch.ops.aten.sin.default, Any)
    link = sf.Link(latency=1e-6, bandwidth=1e9)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("i",), links={"i": link})
        run = sf.shard(double, mesh, sf.P("i"), sf.P(), backend="aten")
        run(torch.ones(4))
        costs = sf.mesh.axes_of(mesh).costs
        registry.add(entry)
        try:
            state.clear()
            assert registry.active() == (entry,)
        finally:
            registry.remove(entry)
        assert redistribute._route.cache_info().currsize == 0
        assert not counts and not run.request.store.entries
        assert sf.mesh.axes_of(mesh).costs == costs != ()
        run(torch.ones(4))
        assert counts["captures"] == 1


def test_the_runtimes_clear_is_the_same_one() -> None:
    run = sf.jit(lambda x: x + 1, backend="aten")
    run(torch.ones(3))
    forget()
    assert not counts
    run(torch.ones(3))
    assert counts["captures"] == 1
