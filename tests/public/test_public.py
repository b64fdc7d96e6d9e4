"""Public names, imported at the first use of one of them."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shardfn as sf
from shardfn import public
from shardfn.public import names, rooms

TYPED = """# pyright: reportAttributeAccessIssue=true
import shardfn as sf
from shardfn import P, placements

reveal_type(sf.P)
reveal_type(sf.jit)
reveal_type(placements)
sf.shrad
"""

FIRST = """
import threading
import torch
import shardfn
assert not hasattr(shardfn, "shrad") and "placements" in dir(shardfn)
import shardfn.placement
from shardfn.random import key
found = []
look = lambda: found.append(shardfn.placements)
threads = [threading.Thread(target=look) for _ in range(5)]
[each.start() for each in threads]
[each.join() for each in threads]
from shardfn import *
from shardfn import placements as again
assert found == [placements] * 5 and placements is again and callable(placements)
assert shardfn.random.key is key and P is shardfn.placement.P
"""


LISTED = {**vars(names), **vars(rooms)}


@pytest.mark.parametrize("name", [*sf.__all__, "__version__"])
def test_a_public_name_is_what_the_list_of_imports_says(name: str) -> None:
    assert getattr(sf, name) is public.attribute(name) is LISTED[name]
    assert name in dir(sf)


def test_each_import_of_the_list_is_public() -> None:
    imported = {name for name in LISTED if not name.startswith("_")}
    assert imported == set(sf.__all__)


def test_a_name_that_is_not_public_is_refused_as_python_does() -> None:
    with pytest.raises(AttributeError, match="module 'shardfn' has no attribute 'x'"):
        public.attribute("x")
    with pytest.raises(ImportError, match="cannot import name 'shrad'"):
        exec("from shardfn import shrad", {})


def test_public_objects_pickle() -> None:
    things: tuple[Any, ...] = (sf.P("a"), sf.auto, sf.jit, sf.placements, sf.Link)
    for x in things:
        again = pickle.loads(pickle.dumps(x))
        assert again is x or again == x


def test_a_public_name_is_no_submodule_but_debug_and_random() -> None:
    """Python gives a package the submodules that somebody imports."""
    modules = [name for name in sf.__all__ if _is_module(name)]
    assert modules == ["debug", "random"]
    assert isinstance(sf.random, ModuleType) and isinstance(sf.debug, ModuleType)


def _is_module(name: str) -> bool:
    return importlib.util.find_spec(f"shardfn.{name}") is not None


GARBAGE = """
import gc
collected = []
gc.callbacks.append(lambda phase, about: collected.append(phase))
import shardfn as sf
sf.jit
assert len(collected) < 20, len(collected)  # some 700 where nothing pauses it
assert gc.isenabled()
assert len(gc.get_objects(generation=0)) < 20_000
"""
OFF = """
import gc
gc.disable()
import torch
gc.freeze()
import shardfn as sf
sf.jit
assert not gc.isenabled() and gc.get_freeze_count()
gc.enable()
from shardfn import public
public.module("public.names")
assert gc.get_freeze_count()
"""


@pytest.mark.parametrize("source", [GARBAGE, OFF])
def test_garbage_rests_while_names_are_imported_and_is_as_before(source: str) -> None:
    subprocess.run([sys.executable, "-c", source], check=True)


def test_names_are_the_same_after_submodules_and_in_threads() -> None:
    subprocess.run([sys.executable, "-c", FIRST], check=True)


def test_pyright_knows_the_types_of_public_names(tmp_path: Path) -> None:
    file = tmp_path / "typed.py"
    file.write_text(TYPED)
    pyright = Path(sys.executable).with_name("pyright")
    done = subprocess.run(
        [pyright, "--pythonpath", sys.executable, file],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(sf.__file__).parents[1],
    )
    assert 'Type of "sf.P" is "type[P]"' in done.stdout
    assert 'Type of "sf.jit" is "(' in done.stdout
    assert 'Type of "placements" is "(' in done.stdout
    assert '"shrad" is not a known attribute of module "shardfn"' in done.stdout
