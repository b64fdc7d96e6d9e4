"""The site. `make docs` builds it with Sphinx, and runs every page that has code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_site")]

import pages  # noqa: E402
import reference  # noqa: E402
from pygments.lexers.special import TextLexer  # noqa: E402

import shardfn  # noqa: E402

project = "shardfn"
author = "The shardfn authors"
copyright = author
version = release = shardfn.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_site"]

html_theme = "sphinx_book_theme"
html_title = "shardfn"
html_theme_options = {"show_toc_level": 2, "home_page_in_toc": True, "use_download_button": True}

myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a fence between two headings

# Pages are run by kernels of this environment, in a folder of their own, on this checkout.
os.environ["PYTHONPATH"] = os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")])
os.environ["SHARDFN_PROGRESS"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Their warning that they talk over TCP, once a page, would hide those of the build.
profile = DOCS.parent / "build/ipython/profile_default"
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text("get_config().IPKernelApp.log_level = 40\n")
os.environ["IPYTHONDIR"] = str(profile.parent)
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 300  # seconds, for each cell
nb_merge_streams = True
nb_output_stderr = "remove"

default_role = "code"
smartquotes = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Source", "notes_style")]


def as_parsed(app: Any, docname: str, source: list[str]) -> None:
    """Give Sphinx the text of a page that it is to parse."""
    text = source[0]
    if docname == "reference/index":
        text = f"{text}\n{reference.trees()}"
    source[0] = pages.page(docname, text, reference.names())


def write_reference(app: Any) -> None:
    """Write the page of each public name, with the how-tos that use it."""
    texts = {f"howto/{page.stem}": page.read_text() for page in sorted(DOCS.glob("howto/*.md"))}
    names = reference.names()
    used = {docname: pages.used(text, names) for docname, text in texts.items()}
    users = {name: [docname for docname in texts if name in used[docname]] for name in names}
    reference.write(DOCS / pages.REFERENCE, users)


def as_restructured(
    app: Any, kind: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Give Sphinx the lines of a docstring as it reads them."""
    lines[:] = reference.as_restructured(lines)


def with_notebook(app: Any, docname: str, template: str, context: Any, doctree: Any) -> None:
    """Offer a page that has code as the notebook that the build has run."""
    path = Path(app.outdir).parent / "jupyter_execute" / f"{docname}.ipynb"
    if doctree is None or not path.exists():
        return
    copy = Path(app.outdir) / "_sources" / f"{docname}.ipynb"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(pages.notebook(path.read_text()))
    context["ipynb_source"] = f"{docname}.ipynb"


def setup(app: Any) -> dict[str, Any]:
    """Write the pages of the reference, and read the others as they are to be parsed."""
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-docstring", as_restructured, priority=100)  # before napoleon
    app.connect("source-read", as_parsed)
    app.connect("html-page-context", with_notebook, priority=400)  # before the theme's buttons
    for name in ("pdb", "output"):
        app.add_lexer(name, TextLexer)
    return {"parallel_read_safe": True}
