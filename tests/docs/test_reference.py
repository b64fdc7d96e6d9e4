"""What the page of each public name says: arguments, result, errors, an example, how-tos."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any

import pytest

import shardfn as sf
from tests.docs.test_site import DOCS, reference, site

# Classes whose objects functions make: nobody calls them with arguments of their own.
MADE = ("Audit", "Bucket", "BucketPlan", "Explanation", "Loader")
MADE += ("Report", "Saving", "Strategy", "Sweep")
NOTHING = None, "None", "Iterator[None]"  # the last of a context manager
MODULES = [name for name in sf.__all__ if isinstance(getattr(sf, name), ModuleType)]


def described() -> dict[str, Any]:
    """Public names but torch's own classes, and the functions of those that are modules."""
    names = {name: getattr(sf, name) for name in sf.__all__ if name not in reference.OF_TORCH}
    for module in MODULES:
        value = names[module]
        listed = getattr(value, "__all__", None) or [
            name
            for name, x in vars(value).items()
            if getattr(x, "__module__", "") == value.__name__
        ]
        members = {f"{module}.{name}": getattr(value, name) for name in listed}
        names |= {name: x for name, x in members.items() if name.rsplit(".")[-1][0] != "_"}
    return names


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring by their names."""
    parts = re.split(r"^(Args|Returns|Raises|Source|Example):", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parameters(value: Any) -> list[str]:
    if inspect.ismodule(value) or not callable(value):
        return []
    return list(inspect.signature(value).parameters)


def lacking(name: str, value: Any) -> list[str]:
    """What the docstring of a name lacks. The site writes those of torch's own classes."""
    about = value if inspect.ismodule(value) or callable(value) else type(value)
    text = inspect.getdoc(about) or ""
    parts, given = sections(text), parameters(value)
    is_error = inspect.isclass(value) and issubclass(value, sf.ShardError)
    is_inherited = is_error and "__init__" not in vars(value)
    linked = "Its arguments are those of :doc:`/reference/names/ShardError`."
    told = [] if is_inherited and linked in reference.entry(name) else given
    args = parts.get("Args", "")
    missing = [f"argument {x}" for x in told if not re.search(rf"^\s+[\w, *]*\b{x}\b", args, re.M)]
    if ">>> " not in parts.get("Example", ""):
        missing.append("an example")
    if inspect.isfunction(value) and "Returns" not in parts:
        hint = inspect.signature(value).return_annotation
        missing += ["Returns"] if hint not in NOTHING else []
    if given and not is_error and name not in MADE and "Raises" not in parts:
        missing.append("Raises")
    return missing


@pytest.mark.parametrize("name", described())
def test_the_docstring_of_a_name_is_complete(name: str) -> None:
    assert lacking(name, described()[name]) == []


def test_a_docstring_that_lacks_parts_is_noticed() -> None:
    def silent(x: int, y: int) -> int:
        """Add.

        Args:
            x: a number.
        """
        return x + y

    assert lacking("silent", silent) == ["argument y", "an example", "Returns", "Raises"]


@pytest.mark.parametrize("name", reference.OF_TORCH)
def test_a_class_of_torch_is_described_by_the_site(name: str) -> None:
    cls, text = getattr(sf, name), reference.OF_TORCH[name]
    assert cls.__module__.startswith("torch.") and f"{cls.__name__}`" in text
    given = re.findall(r"(\w+)[=)]", text.partition("\n")[0])
    assert re.findall(r":param (\w+):", text) == given and (":raises " in text) == bool(given)


@pytest.mark.parametrize("name", sf.__all__)
def test_a_how_to_leads_to_each_name_and_back(name: str) -> None:
    """The site ends a page with the names that its code uses, and a name with its how-tos."""
    pages = {f"howto/{page.stem}": page.read_text() for page in (DOCS / "howto").glob("*.md")}
    users = [page for page, text in pages.items() if name in site.used(text, sf.__all__)]
    assert users, "no how-to uses it"
    leading = site.page(users[0], pages[users[0]], sf.__all__)
    assert f"](../reference/names/{name}.rst)" in leading
    assert f":doc:`/{users[0]}`" in reference.entry(name, users)
