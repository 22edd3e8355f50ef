"""Chromium for the tests of pages: one for those of a file, each page watched for errors and requests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Opener = Callable[..., Any]


# While it runs there is a running event loop in this thread, which tests of other files must not meet.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments, timeout=60_000)
        yield browser
        browser.close()


@pytest.fixture
def open_report(chromium: Any) -> Iterator[Opener]:
    """Open a report once it can be used. Errors in the console, and requests for anything but the file, fail the test."""
    problems: list[str] = []
    pages: list[Any] = []

    def opened(path: Path, width: int = 1280, height: int = 800, scheme: str = "light") -> Any:
        page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        pages.append(page)
        page.set_default_timeout(60_000)
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", lambda r: None if r.url == path.as_uri() else problems.append(f"request: {r.url}"))
        page.goto(path.as_uri())
        page.wait_for_selector("[data-ready]")
        return page

    yield opened
    for page in pages:
        page.close()
    assert not problems
