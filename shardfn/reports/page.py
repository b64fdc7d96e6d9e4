"""The page: a template of HTML with its style, its scripts and the contents of a report as JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STYLE, SCRIPT, CONTENTS, TITLE = "/*STYLE*/", "/*SCRIPT*/", "/*CONTENTS*/", "<!--TITLE-->"


def page_of(contents: Mapping[str, Any]) -> str:
    """Return the HTML of a report, which needs no other file.

    Args:
        contents: what `contents.contents_of` returns.
    """
    texts = {
        STYLE: _file("page.css"),
        SCRIPT: _file("timeline.js") + _file("page.js"),
        TITLE: html.escape(f"{contents['name']}: report of a step"),
        CONTENTS: _embedded(contents),
    }
    page = _file("page.html")
    for place, text in texts.items():
        before, _, after = page.partition(place)
        page = before + text + after
    return page


def _embedded(contents: Mapping[str, Any]) -> str:
    """Write JSON that ends no script element, whatever names the user's program has."""
    text = json.dumps(contents, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")
