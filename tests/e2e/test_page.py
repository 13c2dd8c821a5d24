"""The live page in a real Chromium, against a real server: what it shows, to whom, and that nothing fails meanwhile.

Screenshots are left in build/screenshots.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

import httpx
import pytest
from page_driver import counts_in, num_pixels, point_at_pages, tile
from playwright.sync_api import expect, sync_playwright
from pool_pictures import PictureEngine, busy_view, plan_of, shown
from server_process import ServerProcess, poll
from tiny_models import VOCAB_SIZE, tiny_gemma3, tiny_llama

from girih.checkpoint.tokenizer import Tokenizer
from girih.server.config import ServerConfig

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NO_CHROMIUM = "there is no Chromium on this machine: the live page is not tested (apt-get install chromium)"
if CHROMIUM is None and os.environ.get("CI") != "true":
    pytest.skip(NO_CHROMIUM, allow_module_level=True)

pytestmark = pytest.mark.xdist_group("page")

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
LONG = {"max_position_embeddings": 1 << 16}
ROOM = ("--kv-cache-memory", "16MiB")
PROMPT = "the quick brown fox jumps over the lazy dog and then the other dog"
ENDLESS = {"prompt": PROMPT, "max_tokens": 20_000, "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def browser():
    assert CHROMIUM is not None, NO_CHROMIUM
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def show(gemma):
    """Serve a picture of a pool; returns the URL."""
    with contextlib.ExitStack() as stack:

        def show(config, view, options=None):
            return stack.enter_context(shown(PictureEngine(gemma, config, view), options or ServerConfig()))

        yield show


@pytest.fixture
def open_page(browser, show):  # whose servers outlive the pages
    """Open the page; in the end nothing may have failed in it, but what the test says will."""
    contexts, problems = [], []

    def open_page(url, *, allowed="willReadFrequently", **options):  # which `num_pixels` does
        def note(text):
            if not re.search(allowed, text):
                problems.append(text)

        context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: note(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: note(str(error)))
        page.on("requestfailed", lambda request: note(f"{request.url}: {request.failure}"))
        page.on("response", lambda answer: answer.status >= 400 and note(f"{answer.status} {answer.url}"))
        page.goto(url)
        expect(page.locator("#status")).to_have_text("live")
        expect(page.locator("#map-scale")).to_contain_text("slab")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    never = VOCAB_SIZE  # no such token: an answer ends when it is stopped
    return tiny_gemma3(tmp_path_factory.mktemp("gemma"), eos_token_id=never, **LONG)


@pytest.fixture(scope="module")
def server(gemma, tmp_path_factory):
    """A server of a model with two groups and a chat template."""
    options = (*ROOM, "--served-model-name", "tiny")
    with ServerProcess(gemma, *options, folder=tmp_path_factory.mktemp("log")) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server with two API keys, of a model without a chat template."""
    model = tiny_llama(tmp_path_factory.mktemp("llama"), chat_template=None, **LONG)
    options = (*ROOM, "--api-key", "mine", "--api-key", "theirs")
    with ServerProcess(model, *options, folder=tmp_path_factory.mktemp("log")) as server:
        yield server


@contextlib.contextmanager
def running(server, number, **headers):
    """Keep so many requests running until the end."""
    streams = []
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=60, trust_env=False, headers=headers))
        for i in range(number):
            body = {**ENDLESS, "prompt": PROMPT + " again" * i}
            answer = stack.enter_context(client.stream("POST", f"{server.url}/v1/completions", json=body))
            assert answer.status_code == 200
            pieces = answer.iter_raw()
            next(pieces)
            streams.append(pieces)  # one that nobody holds is closed
        yield


def test_the_pages_of_running_requests_are_coloured_and_remain_as_cached_when_they_end(open_page, server):
    page = open_page(server.url)
    assert num_pixels(page, "group", "used", 0) == num_pixels(page, "group", "used", 1) == 0
    with running(server, 3):
        expect(tile(page, "Running")).to_have_text("3")
        expect(page.locator("#requests button")).to_have_count(3)
        poll(lambda: num_pixels(page, "group", "used", 0) > 0, what="the window's pages are shown")
        poll(lambda: num_pixels(page, "group", "used", 1) > 100, what="the pages of all tokens are shown")
        poll(lambda: float(tile(page, "Throughput").inner_text().replace(",", "")) > 0, what="tokens are counted")
        page.get_by_role("button", name="By request").click()
        ids = [int(text.split()[1]) for text in page.locator("#requests b").all_inner_texts()]
        for i in ids:
            poll(lambda i=i: num_pixels(page, "request", "used", i) > 0, what=f"request {i} is shown")
        page.screenshot(path=SCREENSHOTS / "light.png", full_page=True)
    expect(tile(page, "Running")).to_have_text("0")
    expect(page.locator("#requests")).to_have_text("Nothing runs.")
    assert all(num_pixels(page, "request", "used", i) == 0 for i in ids)
    assert num_pixels(page, "request", "cached") > 100
    page.get_by_role("button", name="By group").click()
    poll(lambda: num_pixels(page, "group", "cached", 1) > 100, what="cached pages are shown")
    page.locator("summary, h2", has_text="Plan").scroll_into_view_if_needed()
    rows = page.locator("#plan tr").all_inner_texts()
    assert ["sliding window 8" in rows[0], "full attention" in rows[1]] == [True, True]


def test_pointing_at_a_page_tells_whose_it_is_and_its_tokens(open_page, server, gemma):
    page = open_page(server.url)
    with running(server, 1):
        text = point_at_pages(page, r"(?s)full attention.*tokens 0 to 15")
        (request,) = page.locator("#requests b").all_inner_texts()
        assert request in text
        assert "cmpl-" in text
        tokenizer = Tokenizer.from_directory(gemma)
        tokens = [tokenizer.token_to_text(i) for i in tokenizer.encode(PROMPT)[:16]]
        assert page.locator(".tokens").first.locator("span").all_text_contents() == tokens
        page.locator("#map").press("Enter")  # holds on to it
        page.mouse.move(0, 0)
        expect(page.locator("#held")).to_be_visible()
        expect(page.locator("#inspector")).to_contain_text("tokens 0 to 15")
        page.keyboard.press("Escape")
        expect(page.locator("#inspector")).to_have_text("Nothing is pointed at.")


def test_every_page_can_be_reached_with_the_keyboard(open_page, server):
    page = open_page(server.url)
    page.locator("#map").focus()
    page.keyboard.press("Home")
    expect(page.locator("#inspector .title")).to_contain_text(re.compile("Page 0|Slab 0"))
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#inspector .title")).to_have_text(re.compile("^(Page|Slab) [1-9]"))


def test_pause_stops_asking_and_resume_goes_on(open_page, server):
    page = open_page(server.url)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#status")).to_have_text("paused")
    page.wait_for_timeout(600)  # what was under way
    asked.clear()
    page.wait_for_timeout(1500)
    assert asked == []
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#status")).to_have_text("live")
    poll(lambda: page.wait_for_timeout(50) or len(asked) > 1, what="it asks again")


@pytest.mark.parametrize(("scheme", "other"), [("light", "dark"), ("dark", "light")])
def test_light_and_dark_follow_the_system_until_one_is_chosen(open_page, server, scheme, other):
    page = open_page(server.url, color_scheme=scheme, allowed="ERR_ABORTED|willReadFrequently")  # by the reload

    def theme():
        red, green, blue = map(
            int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))
        )
        return "light" if red + green + blue > 384 else "dark"

    assert theme() == scheme
    page.screenshot(path=SCREENSHOTS / f"idle-{scheme}.png", full_page=True)
    page.get_by_role("button", name=other.capitalize()).click()
    assert theme() == other
    page.reload()
    expect(page.locator("#status")).to_have_text("live")
    assert theme() == other
    poll(lambda: num_pixels(page, "ground") > 0, what="the map has the theme's colours")


def answer_to(server, message, max_tokens):
    """What the API answers to a message."""
    body = {"messages": [{"role": "user", "content": message}], "temperature": 0, "max_tokens": max_tokens}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False).json()
    return answer["choices"][0]["message"]["content"]


def say(page, message, max_tokens):
    """Send a message with the page's box."""
    page.fill("#chat-tokens", str(max_tokens))
    page.fill("#chat-temperature", "0")
    page.fill("#chat-text", message)
    page.press("#chat-text", "Enter")


def test_the_chat_box_streams_an_answer_as_the_api_gives_it(open_page, server):
    page = open_page(server.url)
    message = "<img src=x onerror=alert(1)>"
    say(page, message, 20)
    expect(page.locator("#chat-log .note")).to_contain_text("tokens of answer")
    assert page.locator("#chat-log .user").text_content() == message
    assert page.locator("#chat-log .assistant").text_content() == answer_to(server, message, 20)
    assert page.locator("#chat-log img").count() == 0


def test_the_chat_box_stops_an_answer_and_its_pages_are_free(open_page, server):
    page = open_page(server.url, allowed="completions: net::ERR_ABORTED")  # by the button
    say(page, "tell me everything", 50_000)
    expect(page.locator("#chat-log .assistant")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#chat-log .note")).to_have_text("stopped")
    server.wait_until_idle()
    assert page.locator("#chat-log .assistant").text_content()


def test_with_keys_the_page_asks_for_one_and_shows_the_text_of_ones_own_tokens_only(open_page, guarded):
    for path in ("/", "/dashboard/state", "/dashboard/plan", "/dashboard/main.js", "/dashboard/page?group=0&page=0"):
        refused = httpx.get(guarded.url + path, trust_env=False)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic")
    page = open_page(guarded.url, http_credentials={"username": "me", "password": "mine"})
    with running(guarded, 1, authorization="Bearer theirs"):
        text = point_at_pages(page, "Request")
        assert "The text is shown to the API key that it belongs to." in text
        assert "cmpl-" not in text
        assert page.locator(".tokens").count() == 0
    expect(tile(page, "Running")).to_have_text("0")
    with running(guarded, 1, authorization="Bearer mine"):
        assert "the quick brown" in point_at_pages(page, "tokens 0 to 15")


def test_without_a_chat_template_the_box_completes_texts_with_the_pages_own_password(open_page, guarded):
    page = open_page(guarded.url, http_credentials={"username": "me", "password": "mine"})
    page.fill("#chat-temperature", "0")
    page.fill("#chat-tokens", "5")
    page.fill("#chat-text", PROMPT)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-log .note")).to_contain_text("of answer")
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    headers = {"authorization": "Bearer mine"}
    answer = httpx.post(f"{guarded.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False).json()
    assert page.locator("#chat-log .assistant").text_content() == answer["choices"][0]["text"]


def test_a_hundred_thousand_slabs_are_drawn_and_looked_into(open_page, show):
    config = plan_of(100_000)
    view = busy_view(config, 200)
    url = show(config, view)
    page = open_page(url)
    expect(page.locator("#map-scale")).to_contain_text("100,000 slabs")
    poll(lambda: num_pixels(page, "group", "used", 1) > 1000, what="the map is drawn")
    page.screenshot(path=SCREENSHOTS / "100000-slabs.png", full_page=True)
    for _ in range(4):
        page.get_by_role("button", name="Zoom in").click()
    expect(page.locator("#map-scale")).to_have_text("100,000 slabs, one square each")
    poll(lambda: num_pixels(page, "group", "used", 1) > 1000, what="single pages are shown")
    page.locator("#map").evaluate("(map) => { map.scrollTop = map.scrollHeight; }")
    page.locator("#map").press("End")
    expect(page.locator("#inspector")).to_contain_text("99,999")
    free = [facts["free"] for facts in counts_in(page)]
    assert free == [int((pages.rows == -1).sum()) for pages in view.classes[0].groups.values()]


def test_a_public_page_fits_a_phone_shows_no_text_and_asks_for_a_key_to_chat(open_page, show):
    config = plan_of(100)
    options = ServerConfig(api_key=("secret",), public_dashboard=True)
    url = show(config, busy_view(config, 5), options)
    page = open_page(url, allowed="401", viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.screenshot(path=SCREENSHOTS / "phone.png", full_page=True)
    assert "The text is shown to the API key that it belongs to." in point_at_pages(page, "Request 100")
    expect(page.locator("#key")).to_be_visible()
    page.fill("#chat-text", "hello")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-log .note")).to_contain_text("give one of the server's API keys")


def test_the_page_may_load_nothing_from_elsewhere_and_there_are_only_its_own_files(show):
    config = plan_of(100)
    url = show(config, busy_view(config, 5))
    policy = httpx.get(url, trust_env=False).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for path in ("/dashboard/nothing.js", "/dashboard/..%2fapp.py", "/dashboard/__init__.py"):
        assert httpx.get(url + path, trust_env=False).status_code == 404
