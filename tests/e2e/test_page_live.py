"""The page at / in headless Chromium, at a server with the demo model: chat, live plots, files and batches."""

import json
from pathlib import Path

from jaxserve.library.serving import RunningServer
from tests.e2e.browser import ENDED, Browser, ask, open_page


def test_a_chat(server: RunningServer, browser: Browser, tmp_path: Path) -> None:
    open_page(browser, server.url)
    browser.run("document.getElementById('temperature').value = 0")
    ask(browser, "What is the capital of France?")
    browser.wait(f"{ENDED} === 1")
    assert "Paris" in browser.run("document.querySelector('.assistant .body').innerText")
    ask(browser, "List 3 countries and their capitals.")
    browser.wait(f"{ENDED} === 2")
    browser.picture(tmp_path / "chat.png")
    browser.open(f"{server.url}/", width=390, dark=True)  # a narrow screen; the conversation is kept
    browser.wait("document.querySelectorAll('.message').length === 4")
    assert browser.run("document.documentElement.scrollWidth") <= 390
    browser.picture(tmp_path / "narrow.png")
    assert browser.complaints == []


def test_the_live_page_and_a_batch(server: RunningServer, browser: Browser, tmp_path: Path) -> None:
    open_page(browser, server.url)
    browser.run("location.hash = 'live'")
    browser.wait("[...document.querySelectorAll('polyline')].at(-1)?.getAttribute('points')")
    browser.run("document.getElementById('question').value = 'Tell me a long story.'")
    browser.run("document.getElementById('ask').requestSubmit()")
    browser.wait("/,2( |$)/.test(document.querySelector('polyline').getAttribute('points'))")  # a peak in tokens/s
    browser.picture(tmp_path / "live.png")
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 8}
    (tmp_path / "work.jsonl").write_text(json.dumps(line | {"body": body}) + "\n")
    browser.run("location.hash = 'files'")
    browser.choose_file("#upload", tmp_path / "work.jsonl")
    shown = "[...document.querySelectorAll('button')].some((each) => each.textContent === '{}')"
    browser.wait(shown.format("Start batch"))
    browser.press("Start batch")
    browser.wait("document.getElementById('batch-table').innerText.includes('completed')")
    browser.wait(shown.format("Output"))
    browser.picture(tmp_path / "files.png")
    browser.open(f"{server.url}/?narrow#files", width=390)
    browser.wait(shown.format("Output"))
    assert browser.run("document.getElementById('files').scrollWidth") <= 390
    browser.picture(tmp_path / "files_narrow.png")
    assert browser.complaints == []
