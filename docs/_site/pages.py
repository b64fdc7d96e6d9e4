"""What the site makes of a page: fences that are run, links from names, and the tree of pages.

Pages are plain Markdown, which reads well where they are stored. Sphinx calls `page` with the text
of each before it parses it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from pathlib import Path

NOTEBOOK = """\
---
file_format: mystnb
kernelspec:
  name: python3
---

"""
UNSEARCHED = "---\nno-search: true\n---\n\n"  # a log has all words
RUN = re.compile(r"^```python$", re.MULTILINE)
OUTPUT = re.compile(r"^```output\n.*?^```\n", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)
WRITTEN = re.compile(r"\bsf\.(\w+)")
IMPORTED = re.compile(r"^from shardfn import (.*)$", re.MULTILINE)
NAME = re.compile(r"(?<![\[`])`(?:sf\.)(\w+)([^`\n|]*)`(?!`|\])")
PAGE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[\w./-]+\.md)\)")
LOCAL = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.|\|) \[[^\]]+\]\(([\w./-]+)\.md\)", re.MULTILINE)
TREES = ("index", "learn/index", "howto/index", "reference/index")
REFERENCE = "reference/names"
NAMING = ("howto/", "learn/", "start", "tour")  # pages that end with the names that they use


def page(docname: str, text: str, names: Collection[str]) -> str:
    """The text that Sphinx parses.

    Args:
        docname: the path of the page from docs, without its suffix.
        text: the page.
        names: the public names, which have a page of the reference each.

    Returns:
        The page with code to run, links to the reference, and a table of contents.
    """
    if docname.startswith(REFERENCE):
        return text
    if docname.startswith("logs/"):
        return UNSEARCHED + text
    if docname in TREES:
        text = with_tree(text)
    if docname.startswith(NAMING):
        text = with_names(docname, text, names)
    text = with_links(docname, without_outside(docname, text), names)
    return run(text)


def used(text: str, names: Collection[str]) -> list[str]:
    """The public names that a page uses, in its code or between it, in the order of the names.

    Example:
        >>> used("`sf.jit`, then\\n```python\\nfrom shardfn import P\\n```", ["P", "jit", "grad"])
        ['P', 'jit']
    """
    found = set(WRITTEN.findall(text))
    for line in IMPORTED.findall(text):
        found |= {name.strip() for name in line.split(",")}
    return [name for name in names if name in found]


def with_names(docname: str, text: str, names: Collection[str]) -> str:
    """The page with links, at its end, to the reference of the names that it uses.

    Example:
        >>> print(with_names("howto/fit", "Call `sf.jit(f)`.", ["jit"]))
        Call `sf.jit(f)`.
        <BLANKLINE>
        Names on this page: `sf.jit`.
        <BLANKLINE>
    """
    listed = ", ".join(f"`sf.{name}`" for name in used(text, names))
    return f"{text.rstrip()}\n\nNames on this page: {listed}.\n" if listed else text


def run(text: str) -> str:
    """The page with its Python fences as cells to run. Their outputs take the place of those that
    the page shows.

    Example:
        >>> print(run("```python\\nprint(1)\\n```\\n```output\\n1\\n```\\n").splitlines()[6:])
        ['```{code-cell} ipython3', 'print(1)', '```']
    """
    if not RUN.search(text):
        return text
    text = OUTPUT.sub("", text)
    return NOTEBOOK + RUN.sub("```{code-cell} ipython3", text)


def with_links(docname: str, text: str, names: Collection[str]) -> str:
    """The page with a link from each `sf.name` to its page of the reference.

    Example:
        >>> with_links("howto/fit", "call `sf.jit(f)`", {"jit"})
        'call [`sf.jit(f)`](../reference/names/jit.rst)'
    """
    folder = os.path.relpath(REFERENCE, os.path.dirname(docname) or ".")

    def linked(match: re.Match[str]) -> str:
        if match[1] not in names:
            return match[0]
        return f"[{match[0]}]({Path(folder, match[1]).as_posix()}.rst)"

    parts = FENCE.split(text)
    for i in range(0, len(parts), 2):  # between the fences
        lines = parts[i].split("\n")
        lines = [line if line.startswith("#") else NAME.sub(linked, line) for line in lines]
        parts[i] = "\n".join(lines)
    return "".join(parts)


def notebook(text: str) -> str:
    """The notebook that a reader downloads. It stands alone, so its links to other pages are text.

    Args:
        text: the notebook of a page, as JSON.

    Example:
        >>> cell = {"cell_type": "markdown", "source": "[fit](fit.md), [site](https://a.b)"}
        >>> json.loads(notebook(json.dumps({"cells": [cell]})))["cells"][0]["source"]
        'fit, [site](https://a.b)'
    """
    book = json.loads(text)
    for cell in book["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = LOCAL.sub(r"\1", "".join(cell["source"]))
    return json.dumps(book, indent=1)


def without_outside(docname: str, text: str) -> str:
    """The page with the names of pages outside of docs in place of links to them: the site has
    no such pages.

    Example:
        >>> without_outside("tour", "[SECURITY](../SECURITY.md)")
        'SECURITY'
    """
    folder = os.path.dirname(docname)

    def named(match: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(folder, match[2]))
        return match[1] if path.startswith("..") else match[0]

    return PAGE.sub(named, text)


def with_tree(text: str) -> str:
    """The page with a hidden table of contents under each heading: the pages that its list names.

    Example:
        >>> print(with_tree("## Start\\n\\n- [A tour](tour.md)\\n"))
        ## Start
        <BLANKLINE>
        - [A tour](tour.md)
        <BLANKLINE>
        ```{toctree}
        :hidden:
        :caption: Start
        <BLANKLINE>
        tour
        ```
        <BLANKLINE>
    """
    head, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    out = [head]
    for section in sections:
        title = section.partition("\n")[0]
        paths = [path for path in ITEM.findall(section) if not path.startswith("..")]
        tree = "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *paths, "```"])
        end = f"{section.rstrip()}\n\n{tree}\n\n" if paths else section
        out.append(f"## {end}")
    return "".join(out).rstrip("\n") + "\n"
