"""The page at / in headless Chromium, at a server whose engine's answers are a script.

A key, hostile text, the engine while it loads and when it dies, thinking, tools, branches, and a path prefix.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import jaxserve
from jaxserve.api.http.middleware import PAGE_FILES
from jaxserve.config import Config
from jaxserve.errors import EngineDeadError
from jaxserve.types.messages import EngineStats, Outputs
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import DraftCounters
from tests.api.conftest import LiveServer, reply_with
from tests.api.test_batches import chat_line
from tests.api.test_tools import CALL, WEATHER
from tests.e2e.browser import ENDED, LAST, Browser, ask, open_page
from tests.e2e.prefix_proxy import behind_prefix
from tests.waiting import wait_until

WEB = Path(jaxserve.__file__).parent / "assets" / "web"
HTML = {"Accept": "text/html,application/xhtml+xml"}
HOSTILE = r"""
<script>window.owned=1</script> <img src=x onerror="window.owned=2">
[a](javascript:window.owned=3) [b](https://example.org/"onmouseover="window.owned=4) **<b>c</b>**
```html
<script>window.owned=5</script>
```
| <i>d</i> | e |
|---|---|
| 1 | <svg onload=alert(1)> |
"""


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer() as server:
        yield server


@pytest.fixture
def keyed() -> Iterator[LiveServer]:
    with LiveServer(Config().replace(server={"api_key": "secret"})) as server:
        yield server


def test_while_the_engine_loads(browser: Browser, tmp_path: Path) -> None:
    with LiveServer(ready=False) as server:
        browser.open(f"{server.url}/")
        browser.wait("document.getElementById('notice').textContent.includes('the server is')")
        browser.picture(tmp_path / "loading.png")
        server.call(server.link.become_ready)
        browser.wait("document.getElementById('models').value === 'demo'")
        assert browser.run("document.getElementById('notice').hidden")
    assert all("503" in each for each in browser.complaints)


def begin(server: LiveServer, browser: Browser, text: str) -> None:
    """Ask for an answer that shows `text` and then comes no further."""
    reply_with(server, f"{text} " * 30)
    server.link.delay = 0.05
    ask(browser, "Tell me a story.")
    browser.wait(f"{LAST}.innerText.includes('{text}')")
    server.call(server.link.hold.clear)


def test_stop(server: LiveServer, browser: Browser, tmp_path: Path) -> None:
    open_page(browser, server.url)
    begin(server, browser, "never")
    browser.picture(tmp_path / "streaming.png")
    browser.send("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape", windowsVirtualKeyCode=27)
    browser.wait(f"{ENDED} === 1")
    assert browser.run(f"{LAST}.querySelector('.dim').innerText") == "stopped"
    server.wait(lambda: not server.link.running, "the request is aborted")
    assert browser.complaints == []


def test_an_engine_that_dies_in_the_middle(server: LiveServer, browser: Browser, tmp_path: Path) -> None:
    open_page(browser, server.url)
    begin(server, browser, "fine so far")
    server.call(lambda: server.engine._fail_all(EngineDeadError("gone")))
    browser.wait(f"{ENDED} === 1")
    for _ in range(2):  # the mark stays after a reload
        assert "gone" in browser.run("document.querySelector('.assistant .error').innerText")
        assert "fine so far" in browser.run("document.querySelector('.assistant .body').innerText")
        browser.picture(tmp_path / "death.png")
        browser.open(f"{server.url}/?again")
    assert browser.complaints == []


def test_thinking_is_folded_and_tools_are_called(server: LiveServer, browser: Browser, tmp_path: Path) -> None:
    open_page(browser, server.url)
    reply_with(server, f"<think>\nHm, Paris.\n</think>\n\nLet me look.\n{CALL}")
    browser.run(f"document.getElementById('tools').value = {json.dumps(json.dumps([WEATHER]))}")
    ask(browser, "Weather in Paris?")
    browser.wait(f"{ENDED} === 1")
    folds = browser.run(f"[...{LAST}.querySelectorAll('details')].map((each) => [each.open, each.textContent])")
    assert folds == [[False, "ThinkingHm, Paris."], [True, 'Tool call: weather{"city": "Paris"}']]
    browser.picture(tmp_path / "tools.png")
    reply_with(server, "It rains.")
    browser.run(f"{LAST}.querySelector('textarea').focus()")
    browser.type("rain, 12 degrees")
    browser.press("Send results", LAST)
    browser.wait(f"{ENDED} === 2")
    sent = server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids)
    assert "rain, 12 degrees" in sent and '"city"' in sent and "Hm, Paris" not in sent
    browser.picture(tmp_path / "results.png")
    browser.run("document.getElementById('tools').value = '['")
    ask(browser, "And in Rome?")
    browser.wait("document.getElementById('notice').textContent === 'The tools in Settings are not JSON.'")
    assert browser.complaints == []


def test_behind_a_prefix(server: LiveServer, browser: Browser) -> None:
    reply_with(server, "under a prefix")
    with behind_prefix(server.url, "/some/llm") as url:
        open_page(browser, url)
        ask(browser, "Hello")
        browser.wait(f"{ENDED} === 1")
        assert browser.run("document.querySelector('.assistant .body').innerText") == "under a prefix"
        browser.run("location.hash = 'live'")
        browser.wait("[...document.querySelectorAll('polyline')].at(-1)?.getAttribute('points')")
        browser.send("Page.navigate", url="about:blank")
    assert browser.complaints == []


def stored(browser: Browser) -> Any:
    """The texts that are shown of the conversations that the browser keeps."""
    talks = json.loads(browser.run("localStorage.getItem('jaxserve.talks')"))
    shown = []
    for talk in talks:
        texts, at = list[str](), talk.get("last", len(talk["messages"]) - 1)
        while at is not None:
            texts.insert(0, talk["messages"][at]["content"])
            at = talk["messages"][at].get("parent", at - 1 if at else None)
        shown.append(texts)
    return shown


def test_regenerate_edit_and_copy(server: LiveServer, browser: Browser, tmp_path: Path) -> None:
    open_page(browser, server.url)
    reply_with(server, "```\none\n```")
    ask(browser, "A")
    browser.wait(f"{ENDED} === 1")
    browser.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.press("Copy", "document.querySelector('.code')")
    browser.wait("document.querySelector('.code button').textContent === 'Copied'")
    assert browser.run("navigator.clipboard.readText()") == "one"
    reply_with(server, "two")
    browser.press("Regenerate", LAST)
    browser.wait(f"{ENDED} === 1 && {LAST}.querySelector('.body').innerText === 'two'")
    assert stored(browser) == [["A", "two"]]
    browser.press("Edit", "document.querySelector('.user')")
    assert browser.run("document.activeElement.value") == "A"
    enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r", "modifiers": 8}  # with Shift
    browser.send("Input.dispatchKeyEvent", type="keyDown", **enter)
    browser.type("B")
    browser.picture(tmp_path / "edit.png")
    browser.type("\n")
    browser.wait(f"{ENDED} === 1 && document.querySelector('.user .body')?.innerText === 'A\\nB'")
    assert stored(browser) == [["A\nB", "two"]]
    assert browser.complaints == []


SHOWN = "[...document.querySelectorAll('.message .body')].map((each) => each.innerText).join('|')"
USER = "document.querySelector('.user')"
ANSWER = "document.querySelector('.assistant')"


def converse(server: LiveServer, browser: Browser, *turns: tuple[str, str]) -> None:
    """Ask the questions one after another, and wait for each answer."""
    for question, answer in turns:
        before = browser.run("document.querySelectorAll('.assistant').length")
        reply_with(server, answer)
        ask(browser, question)
        browser.wait(f"{ENDED} === {before + 1}")


def test_versions_are_kept(server: LiveServer, browser: Browser, tmp_path: Path) -> None:
    """Of an early answer and of a question, with what follows each of them."""
    open_page(browser, server.url)
    converse(server, browser, ("A", "one"), ("B", "two"))
    reply_with(server, "three")
    browser.press("Regenerate", ANSWER)
    browser.wait(f"{ENDED} === 1 && {SHOWN} === 'A|three'")
    browser.picture(tmp_path / "versions.png")
    browser.press("‹", ANSWER)
    browser.wait(f"{SHOWN} === 'A|one|B|two'")
    browser.press("Edit", "document.querySelectorAll('.user')[1]")
    browser.type("b")
    reply_with(server, "four")
    browser.press("Send", "document.querySelectorAll('.user')[1]")
    browser.wait(f"{ENDED} === 2 && {SHOWN} === 'A|one|Bb|four'")
    sent = server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids)
    assert "one" in sent and "Bb" in sent and "three" not in sent and "two" not in sent
    browser.open(f"{server.url}/?again")
    assert browser.run(SHOWN) == "A|one|Bb|four" and stored(browser) == [["A", "one", "Bb", "four"]]
    browser.press("‹", "document.querySelectorAll('.user')[1]")
    browser.wait(f"{SHOWN} === 'A|one|B|two'")
    browser.press("›", ANSWER)
    browser.wait(f"{SHOWN} === 'A|three'")
    converse(server, browser, ("C", "five"))
    assert browser.run(SHOWN) == "A|three|C|five"
    browser.press("‹", ANSWER)
    browser.wait(f"{SHOWN} === 'A|one|Bb|four'")
    browser.press("Branch", "document.querySelectorAll('.user')[1]")
    browser.wait(f"{SHOWN} === 'A|one|Bb'")
    assert stored(browser) == [["A", "one", "Bb"], ["A", "one", "Bb", "four"]]
    assert browser.complaints == []


def test_an_edit_that_is_given_up_changes_nothing(server: LiveServer, browser: Browser, tmp_path: Path) -> None:
    open_page(browser, server.url)
    converse(server, browser, ("A", "one"), ("B", "two"))
    edited = "document.querySelector('.message > textarea')"
    escape = {"key": "Escape", "code": "Escape", "windowsVirtualKeyCode": 27}
    for give_up in (
        lambda: browser.press("Cancel", USER),
        lambda: browser.send("Input.dispatchKeyEvent", type="keyDown", **escape),
        lambda: browser.press("New conversation"),
    ):
        browser.press("Edit", USER)
        browser.type("never sent")
        assert browser.run(f"{edited}.value") == "Anever sent"
        give_up()
        browser.wait(f"{edited} === null")
    assert browser.run("document.getElementById('question').value") == "" and browser.run(SHOWN) == ""
    browser.press("A")
    browser.wait(f"{SHOWN} === 'A|one|B|two'")
    assert stored(browser) == [["A", "one", "B", "two"]] and len(server.link.seen) == 2
    assert browser.complaints == []


def test_an_answer_that_fails_leaves_the_version_before(server: LiveServer, browser: Browser) -> None:
    open_page(browser, server.url)
    converse(server, browser, ("A", "one"), ("B", "two"))
    browser.run("document.getElementById('tools').value = '['")
    browser.press("Regenerate", ANSWER)
    browser.wait("document.getElementById('notice').textContent === 'The tools in Settings are not JSON.'")
    assert browser.run(SHOWN) == "A|one|B|two" and stored(browser) == [["A", "one", "B", "two"]]
    assert not browser.run("document.querySelector('.tools span')"), "there is one version"
    assert browser.complaints == []


def test_the_settings_are_sent(server: LiveServer, browser: Browser, tmp_path: Path) -> None:
    browser.open(f"{server.url}/", width=390, dark=True)
    browser.press("Settings")
    values = {"system": "Be brief.", "temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 3}
    for name, value in values.items():
        browser.run(f"document.getElementById('{name}').value = {json.dumps(value)}")
    browser.picture(tmp_path / "settings_narrow.png")
    browser.press("Close")
    browser.open(f"{server.url}/?again")  # they are kept
    browser.wait("document.getElementById('models').value === 'demo'")
    ask(browser, "A")
    browser.wait(f"{ENDED} === 1")
    sent = server.link.seen[-1]
    assert "Be brief." in server.link.tokenizer.decode(sent.prompt_token_ids)
    found = sent.params
    assert (found.temperature, found.top_p, found.max_tokens, found.seed) == (0.5, 0.9, 7, 3)
    assert browser.run(f"{LAST}.querySelector('.dim').innerText") == "ended: the limit of tokens is reached"
    assert browser.complaints == []


def hold_after(server: LiveServer, count: int) -> None:
    """Let the engine make no token once it has been sent `count` requests, however long the browser takes to look."""

    def script(prompt: list[int], params: SamplingParams) -> str:
        if len(server.link.seen) >= count:
            server.link.hold.clear()
        return "An answer."

    server.link.script = script


def test_a_batch_in_progress_is_shown_and_cancelled(browser: Browser, tmp_path: Path) -> None:
    lines = [chat_line(number) for number in range(40)]
    (tmp_path / "work.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with LiveServer(store=tmp_path / "store") as server:
        hold_after(server, 20)
        open_page(browser, server.url)
        browser.run("location.hash = 'files'")
        browser.choose_file("#upload", tmp_path / "work.jsonl")
        table = "document.getElementById('batch-table')"
        browser.wait("document.getElementById('file-table').innerText.includes('work.jsonl')")
        browser.press("Start batch")
        browser.wait(f"{table}.querySelector('progress')?.value > 1")
        browser.picture(tmp_path / "batch.png")
        browser.run("location.hash = 'live'")
        plot = "[...document.querySelectorAll('figure')].find((each) => each.textContent.startsWith('Batch progress'))"
        browser.wait(f"/^[1-9]/.test({plot}?.querySelector('b').textContent)")
        browser.picture(tmp_path / "live_batch.png")
        browser.run("location.hash = 'files'")
        browser.press("Cancel", table)
        browser.wait(f"{table}.innerText.includes('cancelled')")
        assert not server.call(lambda: list(server.link.running))
        browser.picture(tmp_path / "cancelled.png")
        browser.send("Page.navigate", url="about:blank")
    assert browser.complaints == []


def test_the_share_of_right_drafts_is_shown(browser: Browser) -> None:
    figure = "[...document.querySelectorAll('figure')].find((each) => each.textContent.startsWith('Drafts accepted'))"
    with LiveServer() as server:

        def tell(drafts: DraftCounters) -> None:
            server.call(lambda: server.link._messages.put_nowait(Outputs([], EngineStats(drafts=drafts))))

        open_page(browser, server.url)
        tell(DraftCounters(1, 4, [0]))
        browser.run("location.hash = 'live'")
        browser.wait(f"{figure}?.textContent.includes('by position 0 %')")
        tell(DraftCounters(3, 12, [2, 1]))
        browser.wait(f"{figure}.textContent === 'Drafts accepted38 %by position 67, 33 %'")
        tell(DraftCounters(3, 12, [2, 1], 9))
        browser.wait(f"{figure}.textContent.endsWith('by position 67, 33 %; the draft model rests')")
    assert browser.complaints == []


def test_the_reasons_of_a_failed_batch_are_shown(browser: Browser, tmp_path: Path) -> None:
    lines = [chat_line(number) for number in range(30)]
    bad = ["{", *(json.dumps(line | {"url": "/v1/nope"}) for line in lines)]
    (tmp_path / "bad.jsonl").write_text("\n".join([json.dumps(lines[0]), *bad]) + "\n")
    with LiveServer(store=tmp_path / "store") as server:
        open_page(browser, server.url)
        browser.run("location.hash = 'files'")
        browser.choose_file("#upload", tmp_path / "bad.jsonl")
        browser.wait("document.getElementById('file-table').innerText.includes('bad.jsonl')")
        browser.press("Start batch")
        browser.wait("document.getElementById('batch-table').innerText.includes('failed')")
        told = browser.run("[...document.querySelectorAll('#batch-table .error')].map((each) => each.textContent)")
        [batch] = httpx2.get(f"{server.url}/v1/batches").json()["data"]
        errors = batch["errors"]["data"]
        shown = [f"Line {error['line']}: {error['message']}" for error in errors[:20]]
        assert told == [*shown, *([f"and {len(errors) - 20} more"] if len(errors) > 20 else [])]
        assert told[0].startswith("Line 2: ")
        browser.picture(tmp_path / "failed.png")
        browser.send("Page.navigate", url="about:blank")
    assert browser.complaints == []


def test_branches_and_deletion(server: LiveServer, browser: Browser, tmp_path: Path) -> None:
    open_page(browser, server.url)
    reply_with(server, "one")
    ask(browser, "A")
    browser.wait(f"{ENDED} === 1")
    browser.press("Branch", "document.querySelector('.user')")
    reply_with(server, "two")
    browser.press("Ask again", LAST)
    browser.wait(f"{ENDED} === 1")
    assert stored(browser) == [["A", "two"], ["A", "one"]]
    begin(server, browser, "never")
    browser.run("document.querySelector('#talks .here button:last-child').click()")
    server.wait(lambda: not server.link.running, "the answer to a deleted conversation is aborted")
    browser.open(f"{server.url}/?again", width=390)
    assert stored(browser) == [["A", "one"]]
    browser.run("document.getElementById('menu').click()")
    browser.picture(tmp_path / "menu.png")
    assert browser.complaints == []


def test_a_key(keyed: LiveServer, browser: Browser, tmp_path: Path) -> None:
    reply_with(keyed, "Hello.")
    browser.open(f"{keyed.url}/")
    browser.wait("document.getElementById('notice').textContent === 'The server needs an API key. Set it in Settings.'")
    browser.picture(tmp_path / "key.png")
    ask(browser, "Hello?")
    browser.wait(f"{ENDED} === 0")
    assert not keyed.link.seen
    browser.press("Settings")
    browser.run("document.getElementById('key').value = 'secret'")
    browser.picture(tmp_path / "settings.png")
    browser.press("Close")
    browser.wait("document.getElementById('models').value === 'demo'")
    browser.press("Ask again")
    browser.wait(f"{ENDED} === 1")
    kept = "[localStorage, sessionStorage].map((each) => each.getItem('jaxserve.key'))"
    assert browser.run(kept) == [None, "secret"]
    browser.run("document.getElementById('keep-key').checked = true")
    browser.run("document.getElementById('settings').dispatchEvent(new Event('close'))")
    assert browser.run(kept) == ["secret", None]
    assert all("401" in each for each in browser.complaints)  # Chromium reports those before the key


def test_export_import_and_search(server: LiveServer, browser: Browser, tmp_path: Path) -> None:
    talks = [{"id": name, "messages": [{"role": "user", "content": f"About {name}"}]} for name in ("cats", "dogs")]
    (tmp_path / "good.json").write_text(json.dumps(talks))
    good = {"role": "user", "content": ""}
    bad = [
        {"messages": [{"role": "assistant", "content": "", "calls": [None]}]},
        {"messages": [good | {"parent": 0}]},  # the parent of itself
        {"messages": [good, good | {"parent": -1}]},
        {"messages": [good], "last": 1},
    ]
    open_page(browser, server.url)
    for number, talk in enumerate(bad):
        path = tmp_path / f"bad{number}.json"
        path.write_text(json.dumps([{"id": "x"} | talk]))
        browser.choose_file("#import", path)
        browser.wait(
            f"document.getElementById('notice').textContent === '{path.name} has no conversations of this page.'"
        )
    browser.choose_file("#import", tmp_path / "good.json")
    titles = "[...document.querySelectorAll('#talks .open')].map((each) => each.textContent).join()"
    browser.wait(f"{titles} === 'About cats,About dogs'")
    browser.run("document.getElementById('search').focus()")
    browser.type("DOGS")
    browser.wait(f"{titles} === 'About dogs'")
    browser.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.press("Export")
    exported = tmp_path / "conversations.json"
    wait_until(lambda: exported.exists() and exported.read_text() == json.dumps(talks, indent=1), "it is exported")
    assert browser.complaints == []


def test_hostile_text_stays_text(server: LiveServer, browser: Browser, tmp_path: Path) -> None:
    browser.open(f"{server.url}/")
    talks = [{"id": "a", "messages": [{"role": "assistant", "content": HOSTILE}]}]
    browser.run(f"localStorage.setItem('jaxserve.talks', {json.dumps(json.dumps(talks))})")
    browser.complaints.clear()
    browser.open(f"{server.url}/?again")
    browser.wait("document.querySelectorAll('.message').length === 1")
    browser.picture(tmp_path / "hostile.png")
    assert browser.run("document.querySelectorAll('#messages :is(script, img, svg, b, i)').length") == 0
    assert browser.run("[...document.querySelectorAll('#messages a')].map((a) => a.protocol)") == ["https:"]
    assert (
        browser.run("document.querySelector('#messages a').getAttributeNames().sort().join()")
        == "href,rel,target,title"
    )
    assert browser.run("window.owned ?? null") is None
    assert browser.complaints == []


def test_markdown(server: LiveServer, browser: Browser, tmp_path: Path) -> None:
    text = """# T
a *b* **c** `d*e*`
f

- g
  - h

3. i

> j

```py
k *l*
```
| m | n |
|---|---|
| o | `p` |"""
    expected = (
        '<h2>T</h2><p>a <em>b</em> <strong>c</strong> <code>d*e*</code>\nf</p><ul><li style="margin-left: 0em;">g</li>'
        '<li style="margin-left: 1em;">h</li></ul><ol start="3"><li style="margin-left: 0em;">i</li></ol>'
        '<blockquote>j</blockquote><div class="code"><pre><code>k *l*</code></pre><button type="button">Copy</button>'
        "</div><table><tr><th>m</th><th>n</th></tr><tr><td>o</td><td><code>p</code></td></tr></table>"
    )
    reply_with(server, text)
    open_page(browser, server.url)
    ask(browser, "Show me everything.")
    browser.wait(f"{ENDED} === 1")
    assert browser.run("document.querySelector('.assistant .body').innerHTML") == expected
    browser.picture(tmp_path / "markdown.png")
    assert browser.complaints == []


def test_long_runs_of_marks_stay_text(server: LiveServer, browser: Browser) -> None:
    """A pattern that takes quadratic time for one of these does not end within the time that `run` waits."""
    browser.open(f"{server.url}/")
    module = "const {render} = await import(new URL('web/markdown.js', document.baseURI))"
    for mark in ("*", "`", "a`b``", "[a](", "| ", "**a", "> ", "- ", "[", "```\n"):
        text = f"{json.dumps('x ' + mark)} + {json.dumps(mark)}.repeat(50000)"
        size = browser.run(f"(async () => {{ {module}; return render({text}).textContent.length }})()")
        assert size > 0, mark


def test_the_page_needs_no_key_and_loads_nothing_else(keyed: LiveServer) -> None:
    page = httpx2.get(f"{keyed.url}/", headers=HTML)
    policy = page.headers["content-security-policy"]
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in policy and "unsafe" not in policy and page.headers["vary"] == "Accept"
    assert "://" not in page.text and 'href="/' not in page.text and 'src="/' not in page.text
    script = httpx2.get(f"{keyed.url}/web/app.js")
    assert script.status_code == 200 and script.headers["content-type"].startswith("text/javascript")
    assert script.headers["content-security-policy"] == policy
    assert httpx2.get(f"{keyed.url}/", headers={"Accept": "*/*"}).text == "Ollama is running"
    assert {path.name for path in WEB.iterdir()} == PAGE_FILES | {"index.html"}
    for name in ("nope.js", "index.html", "..%2fdemo%2fconfig.json"):
        assert httpx2.get(f"{keyed.url}/web/{name}").status_code == 401
        assert httpx2.get(f"{keyed.url}/web/{name}", headers={"Authorization": "Bearer secret"}).status_code == 404
