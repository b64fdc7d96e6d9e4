"""The shape of the code: imports point down the stages, and private torch has one home."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.reading.source import (
    PACKAGE,
    ROOT,
    Import,
    Module,
    imports,
    modules,
    own_edges,
    parse,
    torch_names,
    unit,
)

# Low to high. A module imports from its own package or from lower layers; modules of one layer
# may import
# each other as long as there is no cycle. "" is shardfn/__init__.py, the door.
LAYERS: dict[str, int] = {
    "errors": 0, "state": 0, "extensions": 0, "source_text": 0, "durations": 0, "progress": 0,
    "accepted": 1,
    "_compat": 1,
    "_tree": 2, "tree_pairs": 2, "tracebacks": 2, "stage_log": 2,
    "types": 3,
    "argnums": 3, "patterns": 3,
    "collectives": 3, "mesh_arguments": 3,
    "byte_sizes": 4, "row_bounds": 4, "axis_options": 4, "buckets": 4, "hardware": 4,
    "placement": 4, "mesh": 4, "world": 4,
    "pipelines": 4, "simulated": 4, "own_dtensors": 4,
    "ops": 4,
    "debug": 5, "placement_table": 5, "random": 5, "stored": 5,
    "capture": 6,
    "partition": 7,
    "schedule": 8,
    "inspect": 9,
    "compile": 10,
    "runtime": 11,
    "transforms": 12,
    "jobs": 13, "eager": 13, "training": 13, "ranks": 13, "proof": 13, "pictures": 13,
    "reports": 13, "sweeps": 13,
    "public": 14, "": 14,
    "__main__": 15,
}  # fmt: skip

ONLY_HOME = {"optree": "_tree"}  # package: the one module that imports it
TORCH_HOME = "_compat"  # may touch private torch modules and ask for torch's version
MAX_PRIVATE_MEMBERS = 10
OPTIONAL = {
    "rich",
    "matplotlib",
    "jax",
    "triton",
    "hypothesis",
    "scipy",  # not optional, but slow to import
}  # may be imported inside a function
LATE = {"_compat"}  # may import torch late: torch._dynamo changes os.environ when it is imported
# What stands over the core. The core imports none of them.
ROOMS = ("training", "jobs", "eager", "ranks", "proof", "pictures", "reports", "sweeps")
DOORS = {"public", "", "__main__"}  # name the rooms, and no other part of the core does
DOOR = "public"  # imports the public names at the first use of one of them
SAY_NOTHING = {"utils", "helpers", "common", "manager", "handler", "base", "misc"}
HEAVY = ["matplotlib", "scipy", "rich", "jax", "torch._dynamo", "torch._inductor"]
AT_FIRST_USE = [
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
    "attrs",
    "optree",
    "safetensors",
    "shardfn.public.names",
]


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    modules.cache_clear()


def upward(found: list[Module]) -> list[str]:
    """Imports that climb."""
    return [
        f"{i.where}: {i.module.unit or 'shardfn'} (layer {LAYERS[i.module.unit]}) imports {target} "
        f"(layer {LAYERS[unit(target)]}); imports point down"
        for i, target in own_edges(found)
        if LAYERS.get(i.module.unit, 0) < LAYERS.get(unit(target), 0)
    ]


def cycle(found: list[Module]) -> list[str]:
    """One import cycle, as the files on it."""
    graph: dict[str, set[str]] = {module.name: set() for module in found}
    for i, target in own_edges(found):
        graph[i.module.name].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def into_rooms(found: list[Module]) -> list[str]:
    """Imports of a room by the core."""
    return [
        f"{i.where}: the core imports {target}; let it ask shardfn/extensions.py"
        for i, target in own_edges(found)
        if unit(target) in ROOMS and i.module.unit not in {*ROOMS, *DOORS}
    ]


def opened() -> set[str]:
    """The modules of the core that rooms may import, as docs/design.md lists them."""
    page = (ROOT / "docs" / "design.md").read_text()
    _, _, section = page.partition("\n## Rooms over the core\n")
    rows = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def used_by_rooms(found: list[Module]) -> list[tuple[Import, str]]:
    """Every import by a room of a module of the core, and the name of that module."""
    return [
        (i, target.removeprefix("shardfn."))
        for i, target in own_edges(found)
        if i.module.unit in ROOMS and unit(target) not in ROOMS
    ]


def unopened(found: list[Module]) -> list[str]:
    """Imports by a room of a module of the core that is not open to rooms."""
    names = opened()
    return [
        f"{i.where}: a room imports {name}; docs/design.md lists what it may"
        for i, name in used_by_rooms(found)
        if name not in names and name.partition(".")[0] != TORCH_HOME
    ]


def late(found: list[Module]) -> list[str]:
    """Imports inside functions that are not of an optional package."""
    return [
        f"{i.where}: {i.full} is imported inside a function; move it to the top of the file"
        for module in found
        for i in imports(module)
        if i.inside
        and i.target.split(".")[0] not in OPTIONAL
        and not (module.unit in LATE and i.target.split(".")[0] == "torch")
        and not (module.unit == DOOR and i.full == "shardfn.public.names")
    ]


def strays(found: list[Module]) -> list[str]:
    """Packages imported outside their one home."""
    return [
        f"{i.where}: {package} is imported; only shardfn/{home}.py may"
        for module in found
        for i in imports(module)
        for package, home in ONLY_HOME.items()
        if i.target.split(".")[0] == package and module.unit != home
    ]


def private_torch(found: list[Module]) -> list[str]:
    """Private torch modules, and questions for torch's version, by import or by attribute."""
    return [
        f"{where}: {dotted}; only shardfn/{TORCH_HOME}.py may use it"
        for module in found
        if module.unit != TORCH_HOME
        for where, dotted in torch_names(module)
        if _is_private(dotted)
    ]


def _is_private(dotted: str) -> bool:
    """torch._dynamo.x and torch.__version__, but not torch.ops._c10d_functional and not a
    member of a class.
    """
    if dotted.startswith("torch.ops."):
        return False
    for part in dotted.split(".")[1:]:
        if part in {"__version__", "version"} or (
            part.startswith("_") and not part.startswith("__")
        ):
            return True
        if part[:1].isupper():
            return False
    return False


def private_members(found: list[Module]) -> list[str]:
    """Uses of torch's private members outside of _compat, which has a public name for each."""
    trees = {module: list(ast.walk(module.tree)) for module in found}
    getters = [
        node.args[0].value
        for module, nodes in trees.items()
        if module.unit == TORCH_HOME
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "operator.attrgetter"
    ]
    names = {*getters, "_make_wrapper_subclass"}
    return [
        f"{module.at(node)}: {node.attr}"
        for module, nodes in trees.items()
        if module.unit != TORCH_HOME
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in names
    ]


def nameless(found: list[Module]) -> list[str]:
    """Files and folders with a name that says nothing."""
    return [
        f"{module.path.relative_to(ROOT).as_posix()}: '{part}' says nothing about what is inside"
        for module in found
        for part in module.name.split(".")
        if part.strip("_") in SAY_NOTHING
    ]


def unplaced(found: list[Module]) -> list[str]:
    """Top-level names that LAYERS does not know."""
    names = sorted({module.unit for module in found} - LAYERS.keys())
    return [
        f"shardfn/{name} has no layer; give it one in LAYERS and in docs/design.md"
        for name in names
    ]


def untitled(found: list[Module]) -> list[str]:
    """Files that do not say in their first line what they are for."""
    return [
        f"{m.path.relative_to(ROOT).as_posix()}: no docstring"
        for m in found
        if not ast.get_docstring(m.tree)
    ]


def unregistered(found: list[Module]) -> list[str]:
    """Reads of shardfn's own ops, at the import of a file, that the file does not register: alone
    it cannot be imported. Other files import the constant of an op.
    """
    return [
        f"{module.at(node)}: {ast.unparse(node)}"
        for module in found
        for node in _at_import(module.tree)
        if (match := re.fullmatch(r"torch\.ops\.shardfn\.(\w+)", ast.unparse(node)))
        and not _registers(module, match[1])
    ]


def _at_import(tree: ast.Module) -> Iterator[ast.Attribute]:
    """The attributes that a file reads when it is imported."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Attribute):
            yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            todo += node.decorator_list
        elif not isinstance(node, ast.Lambda):
            todo += ast.iter_child_nodes(node)


def _registers(module: Module, op: str) -> bool:
    """Whether a file registers an op of shardfn's."""
    text = ast.unparse(module.tree)
    return f"'shardfn::{op}'" in text or f".define('{op}(" in text


def busy_door(found: list[Module]) -> list[str]:
    """Statements of shardfn/__init__.py that are more than names, for pyright or for Python."""
    names = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    return [
        f"{module.at(node)}: {ast.unparse(node).splitlines()[0]}"
        for module in found
        if module.name == "shardfn"
        for statement in module.tree.body
        for node in _branches(statement)
        if not isinstance(node, names)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]


def _branches(statement: ast.stmt) -> list[ast.stmt]:
    """What pyright reads and what Python runs, or the statement."""
    if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
        return [*statement.body, *statement.orelse]
    return [statement]


def said(problems: list[str]) -> str:
    """All problems at once, one to a line."""
    return "\n  ".join(["", *problems])


def test_every_module_has_a_layer():
    assert not (bad := unplaced(modules())), said(bad)


def test_imports_point_down_the_stages():
    assert not (bad := upward(modules())), said(bad)


def test_no_import_cycle():
    assert not (bad := cycle(modules())), said(bad)


def test_the_core_imports_no_room():
    assert not (bad := into_rooms(modules())), said(bad)


def test_rooms_import_what_the_core_opens_to_them():
    assert not (bad := unopened(modules())), said(bad)
    used = {name for _, name in used_by_rooms(modules())}
    assert opened() <= used, "docs/design.md lists a module that no room imports"


def test_only_optional_packages_are_imported_inside_functions():
    assert not (bad := late(modules())), said(bad)


def test_only_tree_imports_optree():
    assert not (bad := strays(modules())), said(bad)


def test_only_compat_touches_private_torch_and_its_version():
    assert not (bad := private_torch(modules())), said(bad)


def test_few_private_members_of_torch_are_used_outside_of_compat():
    """Two in the call path, where a function call a leaf would show; the rest write or subclass."""
    assert len(bad := private_members(modules())) <= MAX_PRIVATE_MEMBERS, said(bad)
    assert len(bad) > 0, "the search finds those that there are"


def test_no_file_has_a_name_that_says_nothing():
    assert not (bad := nameless(modules())), said(bad)


def test_every_file_says_what_it_is_for():
    assert not (bad := untitled(modules())), said(bad)


def test_a_file_reads_ops_of_shardfns_that_it_registers():
    assert not (bad := unregistered(modules())), said(bad)
    assert any("torch.ops.shardfn." in ast.unparse(module.tree) for module in modules())


def test_the_door_is_a_list_of_names():
    assert not (bad := busy_door(modules())), said(bad)


LOOK = f"""
import json, os, sys
import torch
before = dict(os.environ)
slow = {AT_FIRST_USE!r}
here = {{name for name in slow if name in sys.modules}}
print("--- shardfn", flush=True)
import shardfn
at_once = [name for name in slow if name in sys.modules and name not in here]
shardfn.jit
print("--- end", flush=True)
print(json.dumps({{
    "at once": at_once,
    "later": [name for name in slow if name in sys.modules],
    "environment": sorted(
        k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)
    ),
    "group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    "heavy": [name for name in {HEAVY!r} if name in sys.modules],
}}))
"""


@pytest.fixture(scope="module")
def fresh() -> dict:
    """What a new interpreter saw of `import shardfn`, and of the first use of a name."""
    run = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert run.returncode == 0, run.stderr
    printed, _, rest = run.stdout.partition("--- shardfn\n")[2].partition("--- end\n")
    return {"printed": printed + run.stderr, **json.loads(rest)}


def test_import_prints_nothing(fresh):
    assert fresh["printed"] == ""


def test_import_changes_no_environment_variable(fresh):
    assert fresh["environment"] == []


def test_import_creates_no_process_group(fresh):
    assert not fresh["group"]


def test_import_loads_no_heavy_package(fresh):
    assert fresh["heavy"] == []


def test_what_takes_long_is_imported_at_the_first_use_of_a_name(fresh):
    assert fresh["at once"] == []
    assert fresh["later"] == AT_FIRST_USE


SAMPLES = [
    (upward, "capture.read", "from ..runtime import call"),
    (upward, "types", "def f():\n    import shardfn.mesh"),
    (into_rooms, "world", "from .jobs.service import SERVICE"),
    (into_rooms, "runtime.call", "import shardfn.training.clip"),
    (unopened, "training.clip", "from ..runtime import dispatch"),
    (late, "mesh", "def f():\n    import json"),
    (late, "mesh", "async def f():\n    if x:\n        from torch import nn"),
    (late, "_compat", "def f():\n    import json"),
    (strays, "types", "from optree import tree_map"),
    (private_torch, "types", "import torch._dynamo as dynamo"),
    (private_torch, "types", "from torch import _guards"),
    (
        private_torch,
        "types",
        "import torch\ntorch.distributed._functional_collectives.wait_tensor(x)",
    ),
    (private_torch, "types", "import torch.distributed as dist\ndist._shard.x"),
    (private_torch, "types", "import torch\ntorch.__version__"),
    (private_torch, "types", "from torch import version"),
    (nameless, "partition.utils", ""),
    (nameless, "_common.walk", ""),
    (unplaced, "extras.walk", ""),
    (untitled, "mesh", "x = 1"),
    (unregistered, "inspect.memory", "PACK = torch.ops.shardfn.pack.default"),
    (unregistered, "inspect.memory", "class A:\n    ops = {torch.ops.shardfn.pack.default: 1}"),
    (unregistered, "inspect.memory", "@keep(torch.ops.shardfn.pack)\ndef f(): ..."),
]

FINE = [
    (
        upward,
        "runtime.call",
        "from ..capture import Program\nfrom . import simulate\nfrom .simulate import run",
    ),
    (upward, "mesh", "from shardfn.world import World"),
    (into_rooms, "public.rooms", "from ..training.clip import clip_by_global_norm"),
    (into_rooms, "training.checkpoints.save", "from ...jobs.service import SERVICE"),
    (unopened, "training.clip", "from ..errors import TreeError\nfrom .._compat import patched"),
    (late, "inspect.picture", "def f():\n    from matplotlib import pyplot\n    import rich.table"),
    (late, "_compat", "def f():\n    import torch._dynamo"),
    (strays, "_tree", "import optree.integrations.attrs"),
    (private_torch, "_compat", "import torch._dynamo\ntorch.__version__"),
    (
        private_torch,
        "types",
        "import torch\ntorch.ops._c10d_functional.all_reduce(x)\ntorch.Tensor._make_subclass(x)",
    ),
    (private_torch, "types", "import torch\nx._private\ntorch.fx.Graph().nodes"),
    (nameless, "partition.base_case", ""),
    (
        unregistered,
        "ops.pack",
        "@custom_op('shardfn::pack')\ndef pack(): ...\nPACK = torch.ops.shardfn.pack.default",
    ),
    (unregistered, "inspect.memory", "def f():\n    return torch.ops.shardfn.pack.default"),
]


def _sample(dotted: str, text: str) -> list[Module]:
    return [parse(f"shardfn.{dotted}", PACKAGE / (dotted.replace(".", "/") + ".py"), text)]


@pytest.mark.parametrize(("find", "dotted", "text"), SAMPLES)
def test_a_broken_rule_is_noticed(find, dotted, text):
    assert find(_sample(dotted, text))


@pytest.mark.parametrize(("find", "dotted", "text"), FINE)
def test_a_kept_rule_is_not_reported(find, dotted, text):
    assert not find(_sample(dotted, text))


def test_a_cycle_is_noticed_and_printed():
    found = _sample("mesh", "from . import world") + _sample("world", "from .mesh import Mesh")
    (shown,) = cycle(found)
    assert sorted(set(shown.split(" -> "))) == ["shardfn.mesh", "shardfn.world"]


def test_a_busy_door_is_noticed():
    door = parse("shardfn", PACKAGE / "__init__.py", "'''Door.'''\nimport torch\ndef f(): ...")
    assert busy_door([door]) == ["shardfn/__init__.py:3: def f():"]


def test_a_door_is_as_busy_as_its_branches():
    text = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\n    f()"
    door = parse("shardfn", PACKAGE / "__init__.py", text)
    assert busy_door([door]) == ["shardfn/__init__.py:5: f()"]
