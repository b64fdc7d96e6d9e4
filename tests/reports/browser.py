"""A browser without a window, for tests of the page: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
REQUIRED = "SHARDFN_BROWSER"  # set by `make report-check`: a test that lacks the browser fails


def missing() -> str | None:
    """What the tests lack here; None if they can run."""
    if os.environ.get(REQUIRED):
        return None
    if CHROMIUM is None:
        return "chromium is not installed (make report-check installs it)"
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (make report-check installs it)"
    return None


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A browser of Playwright, that asks no network."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()
