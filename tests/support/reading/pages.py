"""Reading the pages of docs: the program of a page, and the output that it shows after each part.

A fence ```python is run. A fence ```output after it is what it prints. Other fences are shown only.
`python -m tests.support.reading.pages docs/learn/*.md` writes the outputs again.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

from tests.support.reading.source import ROOT

CODE = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n?```output\n(?P<shown>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
NAME = "page.py"  # the file that source lines name


class Cell(NamedTuple):
    """One part of the program of a page.

    Args:
        code: the text of the fence.
        shown: the output that the page shows after it. None if it shows none.
    """

    code: str
    shown: str | None


def pages() -> list[Path]:
    """Every page of docs that has code to run."""
    every = sorted(Path(ROOT, "docs").rglob("*.md"))
    return [page for page in every if "_build" not in page.parts and cells(page.read_text())]


def cells(text: str) -> list[Cell]:
    """The parts of the program of a page, in order."""
    return [Cell(match["code"], match["shown"]) for match in CODE.finditer(text)]


def printed(text: str, name: str) -> list[str]:
    """Run the program of a page in the current folder.

    Args:
        text: the page.
        name: of the page. Each has a module of its own, as Dynamo remembers modules by name.

    Returns:
        what each part prints, without spaces at the ends of lines.
    """
    parts = cells(text)
    Path(NAME).write_text("".join(part.code for part in parts))
    module = types.ModuleType(f"program_of_{name.replace('-', '_')}")
    sys.modules[module.__name__] = module
    outputs, line = [], 0
    try:
        for part in parts:
            code = compile("\n" * line + part.code, os.path.abspath(NAME), "exec")
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(code, vars(module))
            line += part.code.count("\n")
            outputs.append(_plain(output.getvalue()))
    finally:
        del sys.modules[module.__name__]
    return outputs


def with_outputs(text: str, outputs: list[str]) -> str:
    """The page with these outputs in place of those that it shows."""
    each = iter(outputs)

    def written(match: re.Match[str]) -> str:
        output = next(each)
        shown = f"\n```output\n{output}```\n" if output else ""
        return f"```python\n{match['code']}```\n{shown}"

    return CODE.sub(written, text)


def _plain(output: str) -> str:
    lines = output.replace(f"{os.getcwd()}/", "").splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def main(names: list[str]) -> None:
    """Write the outputs of pages again."""
    for page in map(Path, names):
        text = page.read_text()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            outputs = printed(text, page.stem)
        page.write_text(with_outputs(text, outputs))


if __name__ == "__main__":
    main([os.path.abspath(name) for name in sys.argv[1:]])
