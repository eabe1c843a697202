"""The page in a browser, where Chromium and the package playwright are installed."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.torch_gpt2.test_serve import Server, model, server, tokenizer

__all__ = ["model", "server", "tokenizer"]
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        launched = driver.chromium.launch(executable_path=chromium, args=options)
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page; fails where it says an error or asks for anything of another place."""
    context = browser.new_context(viewport={"width": 1000, "height": 800}, locale="en")
    opened, wrong, asked = context.new_page(), [], []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(f"http://127.0.0.1:{server.port}/")
    yield opened
    context.close()
    assert wrong == []
    assert all(url.startswith(f"http://127.0.0.1:{server.port}/") for url in asked)


def ends(page: Any, word: str) -> None:
    page.locator("#status", has_text=word).wait_for(timeout=20_000)


def test_continuations_beside_each_other(page: Any, server: Server) -> None:
    """By keyboard only: the texts are the server's, and a token's probabilities are shown."""
    page.locator("h1", has_text="small").wait_for()
    page.fill("#prompt", "To be, or not")
    page.fill("#max_tokens", "12")
    page.fill("#seed", "5")
    page.keyboard.press("Control+Enter")
    ends(page, "Done: 24 tokens")
    settings = {"strategy": "sampling", "temperature": 0.9, "top_k": 40, "repetition_penalty": 1.1}
    expected = [text for text, _ in server.expected("To be, or not", 12, 2, 5, **settings)]
    assert page.locator(".text").evaluate_all("all => all.map(each => each.textContent)") == [
        f"To be, or not{text}" for text in expected
    ]
    assert "tokens a second" in page.inner_text("#status")
    page.locator(".text").nth(1).focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home"):
        page.keyboard.press(key)
    assert page.locator(".token.here").count() == 1
    rows = page.locator("#detail tr").all_inner_texts()
    assert 6 <= len(rows) <= 7 and rows[-1].startswith("all others")
    assert page.locator("#detail .chosen").count() == 1
    page.keyboard.press("Tab")
    assert page.locator("#detail").is_hidden()
    page.keyboard.press("Enter")
    assert page.input_value("#prompt") == f"To be, or not{expected[1]}"


def test_facts_a_legend_and_a_command(page: Any, server: Server) -> None:
    """The command gives the texts of the page; the answers are seen without scrolling."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#facts", has_text="2 layers × 32 · 1,635,744 parameters").wait_for()
    assert "64 positions · 50,257 tokens in the vocabulary · torch" in page.inner_text("#facts")
    assert page.locator("#legend").is_hidden()
    page.check("#heat")
    assert page.inner_text("#legend").endswith("100 %10 %2 %0.2 %0.03 %")
    for width, prompt in ((1200, 'It\'s "so"'), (420, "a $b `c`\n")):
        page.set_viewport_size({"width": width, "height": 700})
        page.reload()
        page.fill("#prompt", prompt)
        page.locator("#seed").evaluate("field => { field.value = 5 }")
        page.locator("#max_tokens").evaluate("field => { field.value = 9 }")
        page.click("#go")
        ends(page, "Done")
        texts = page.locator(".text").evaluate_all("all => all.map(each => each.textContent)")
        tops = page.locator(".text").evaluate_all(
            "all => all.map(each => each.getBoundingClientRect().top)"
        )
        assert min(tops) < 600
        page.click("#curl")
        ends(page, "Copied")
        command = page.evaluate("navigator.clipboard.readText()")
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        choices = json.loads(done.stdout)["choices"]
        assert [prompt + each["text"] for each in choices] == texts


def test_stop_an_error_and_both_languages(page: Any, server: Server) -> None:
    page.fill("#prompt", "a")
    page.fill("#max_tokens", "63")
    page.fill("#n", "16")
    page.click("#go")
    page.keyboard.press("Escape")
    ends(page, "Stopped")
    page.fill("#max_tokens", "999")
    page.click("#go")
    ends(page, "go beyond the model's 64 positions")
    assert page.get_attribute("#status", "class") == "wrong"
    page.fill("#max_tokens", "3")
    page.click("#language")
    page.click("#go")
    ends(page, "完成：48 个 token")
    assert page.inner_text("#go") == "续写" and page.get_attribute("html", "lang") == "zh-CN"
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    assert page.inner_text("#go") == "续写" and page.get_attribute("html", "data-theme") == "dark"
