"""The page in a browser: writing, scrubbing, two models, words selected and refilled, noise, a telephone, errors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the service needs imdm[serve]")
pytest.importorskip("playwright", reason="the page is tried with playwright, which is not installed")

from playwright.sync_api import Page, expect, sync_playwright

from imdm.data.tokenizers import train_bpe
from imdm.serving.engine import Engine
from imdm.serving.server import in_background
from imdm.serving.settings import Settings
from imdm.shipped import listed
from imdm.writer import Writer
from tests.conftest import chromium, tiny_model
from tests.serving.test_play import MASK, writers

SHOTS = os.environ.get("IMDM_SCREENSHOTS")  # a folder to leave pictures in
pytestmark = pytest.mark.slow


class Service:
    """The service on a free port, as long as the block lasts."""

    address: str

    def __init__(self, models: dict[str, Writer] | None = None, **settings: Any) -> None:
        self.engine = Engine(models or writers(96), Settings(**settings))
        self.running = in_background(self.engine)

    def __enter__(self) -> Service:
        self.address = f"http://127.0.0.1:{self.running.__enter__().port}"
        return self

    def __exit__(self, *error: Any) -> None:
        self.running.__exit__(*error)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service() as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        found = chromium(playwright)
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Opens the page; fails where it says anything on its console, asks for anything from elsewhere, or overflows."""
    contexts, wrong = [], list[str]()

    def opening(address: str, width: int = 1280, height: int = 900, failing: bool = False, **how: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **how)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        refused = "Failed to load resource" if failing else None
        page.on("console", lambda said: said.text.startswith(refused or "\0") or wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith(address) or wrong.append(asked.url))
        page.goto(address)
        return page

    yield opening
    for context in contexts:
        for page in context.pages:
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is too wide"
        context.close()
    assert not wrong


def ready(page: Page) -> Page:
    expect(page.locator("#model option")).to_have_count(3)
    page.select_option("#model", "noisy")
    page.fill("#prompt", "The cat")
    return page


def shot(page: Page, name: str) -> None:
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=True)


def text_of(page: Page, panel: str, number: int = 0) -> str:
    """What is to be read, masked tokens left out."""
    shown = "all => all.map(one => (one.previousSibling?.textContent ?? '') + one.textContent).join('')"
    return page.locator(f"{panel} .text").nth(number).locator(".token:not(.masked)").evaluate_all(shown)


def printable(text: str) -> str:
    return re.sub("[\x00-\x08\x0b-\x1f\x7f]", "\ufffd", text)


def played(page: Page, panel: str, steps: int) -> None:
    """Waits until the last step is shown."""
    expect(page.locator(f"{panel} .player output").first).to_have_text(f"{steps} / {steps}")


def number_in(page: Page, panel: str, name: str) -> float:
    found = page.locator(f"{panel} .figures div", has=page.locator("dt", has_text=name)).first.locator("dd")
    expect(found).to_have_text(re.compile(r"^[\d.,]+$"))
    return float(found.inner_text().replace(",", ""))


def test_write_and_scrub(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.fill("#steps", "6")
    page.fill("#seed", "3")
    page.click("#go")
    played(page, "#write", 6)
    (expected,) = service.engine.writers["noisy"].write("The cat", steps=6, seed=3)
    assert text_of(page, "#write") == printable(expected.text)
    assert number_in(page, "#write", "evaluations") == expected.evaluations
    assert number_in(page, "#write", "perplexity") > 1
    expect(page.locator("#write .figures .note")).to_contain_text("perplexity by ")
    assert number_in(page, "#write", "entropy") > 0
    expect(page.locator("#status")).to_contain_text("network evaluations")
    expect(page.locator("#write .legend li")).to_have_count(2 + 4)
    shot(page, "write")

    scrubber = page.locator("#write .player input")
    scrubber.fill("0")
    assert text_of(page, "#write") == "The cat"
    counts = []
    for step in range(7):
        scrubber.fill(str(step))
        counts.append(page.locator("#write .text .written:not([hidden])").count())
        steps = page.locator("#write .text .written").evaluate_all("all => all.map(one => Number(one.dataset.step))")
        assert all(0 <= found < step for found in steps)
    assert counts == sorted(counts)
    assert counts[-1] > 0
    scrubber.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#write .player output")).to_have_text("5 / 6")


def test_the_judge_reads_while_a_text_is_written(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.fill("#steps", "16")
    rows = list[Any]()
    page.on("request", lambda asked: asked.url.endswith("/play/judge") and rows.append(asked.post_data_json))
    page.click("#go")
    assert number_in(page, "#write", "perplexity") > 1
    sizes = [len(asked["row"]) for asked in rows]
    assert 2 <= len(sizes) <= 4
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == 96
    assert len({asked["given"] for asked in rows}) == 1


def test_a_token_tells_its_step_and_probability_by_mouse_and_by_keyboard(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.click("#go")
    played(page, "#write", 8)
    told = re.compile(r"step \d of 0–7 · probability [<>]? ?\d\.\d\d")
    page.locator("#write .text .written", has_text=re.compile("^[a-z]+$")).first.hover()
    expect(page.locator("#tip")).to_have_text(told)
    page.locator("#write .text .token[tabindex='0']").focus()
    expect(page.locator("#tip")).to_have_text("given")
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_have_text(told)
    expect(page.locator("#write .text .token:focus")).to_have_attribute("aria-label", told)
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()


def test_steps_can_be_told_apart_without_colour(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.fill("#steps", "4")
    page.click("#go")
    played(page, "#write", 4)
    lines = page.locator("#write .legend .written").evaluate_all(
        "all => all.map(one => getComputedStyle(one).textDecorationStyle)"
    )
    assert len(set(lines)) == 4
    page.check("#write .legend input")
    number = page.locator("#write .text .written[data-step='3']:not([hidden])").first
    assert number.evaluate("one => getComputedStyle(one, '::after').content") == '"3"'


def test_what_a_model_is_given_is_text_and_nothing_else(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.fill("#prompt", "<i>&amp;<b>")
    page.click("#go")
    played(page, "#write", 8)
    assert text_of(page, "#write").startswith("<i>&amp;<b>")
    assert page.locator("#write .text i, #write .text b").count() == 0


def test_a_model_of_whole_texts_ends_them_itself(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.select_option("#model", "whole")
    page.click("#go")
    played(page, "#write", 8)
    (expected,) = service.engine.writers["whole"].write("The cat", steps=8)
    assert text_of(page, "#write") == printable(expected.text)
    assert page.locator("#write .text .masked:visible").count() == 0


def test_two_models_side_by_side(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.click("#tab-beside")
    page.select_option("#other", "plain")
    page.fill("#steps", "5")
    page.click("#go")
    played(page, "#beside", 5)
    for place, name in enumerate(["noisy", "plain"]):
        expect(page.locator("#beside h3").nth(place)).to_have_text(name)
        (expected,) = service.engine.writers[name].write("The cat", steps=5, order="random")
        assert text_of(page, "#beside", place) == printable(expected.text)
    page.locator("#beside .player input").fill("2")
    steps = page.locator("#beside .text .written").evaluate_all("all => all.map(one => Number(one.dataset.step))")
    assert set(steps) <= {0, 1}
    shot(page, "beside")


def test_the_places_of_a_step_are_chosen_and_the_same_side_by_side(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    writer = service.engine.writers["noisy"]
    expect(page.locator("#order option").first).to_have_text("as the model does (random)")
    texts = {order: writer.write("The cat", steps=4, seed=3, order=order)[0].text for order in ("random", "spread")}
    assert len(set(texts.values())) == 2
    page.fill("#steps", "4")
    page.fill("#seed", "3")
    for order, chosen in (("random", ""), ("spread", "spread"), ("random", "random")):
        page.select_option("#order", chosen)
        page.click("#go")
        played(page, "#write", 4)
        assert text_of(page, "#write") == printable(texts[order])

    page.click("#tab-beside")
    page.select_option("#order", "")
    for first, second in (("noisy", "plain"), ("plain", "noisy")):  # `plain` by itself writes in spread order
        page.select_option("#model", first)
        page.select_option("#other", second)
        page.click("#go")
        played(page, "#beside", 4)
        sides = page.locator("#beside .text")
        when = [
            sides.nth(i).locator(".token").evaluate_all("all => all.map(one => one.dataset.step ?? '')")
            for i in range(2)
        ]
        assert when[0] == when[1]
        assert "3" in when[0]


def test_the_first_model_is_chosen_and_each_is_described_below_its_name(opened: Any) -> None:
    models = writers(96)
    own, shipped = "mine", "stories-imdm"
    about = next(model.about for model in listed() if model.name == shipped)
    with Service({own: models["plain"], shipped: models["noisy"]}) as running:
        page = opened(running.address)
        expect(page.locator("#model")).to_have_value(own)
        page.click("#tab-beside")
        expect(page.locator("#other")).to_have_value(shipped)
        expect(page.locator(".field:has(#model) .about")).to_have_text("")
        expect(page.locator(".field:has(#other) .about")).to_have_text(about)
        shot(page, "described")
        page.select_option("#model", shipped)
        expect(page.locator("#other")).to_have_value(own)  # never the same beside, unless it is chosen there
        expect(page.locator(".field:has(#other) .about")).to_have_text("")
        page.select_option("#other", shipped)
        expect(page.locator("#other")).to_have_value(shipped)


def test_words_are_selected_by_mouse_and_refilled(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.click("#tab-fill")
    page.fill("#own", "The cat sat on the mat.")
    page.click("#take")
    words = page.locator("#fill .text .token:not([hidden])")
    expect(page.locator("#fill .text")).to_have_text("The cat sat on the mat.")
    expect(page.locator("#fill > .note")).to_have_text("Nothing is selected yet.")
    words.first.click()
    expect(page.locator("#fill .text .token.chosen")).not_to_have_count(0)
    chosen = page.locator("#fill .text .token.chosen").count()
    page.click("#go")
    played(page, "#fill", 8)
    expect(page.locator("#fill > .note")).to_contain_text(f"{chosen} tokens were written again")
    assert text_of(page, "#fill").endswith(" cat sat on the mat.")
    expect(page.locator("#fill .text .written")).to_have_count(chosen)
    before, seed = text_of(page, "#fill"), page.input_value("#seed")
    page.click("#go")  # the same once more: another seed
    expect(page.locator("#seed")).not_to_have_value(seed)
    played(page, "#fill", 8)
    assert text_of(page, "#fill") != before
    shot(page, "fill")


def test_refill_pressed_twice_is_written_once_and_to_its_end(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.click("#tab-fill")
    expect(page.locator("#fill .text")).to_contain_text("Once upon a time")
    page.get_by_role("button", name="Keep selection").click()
    page.evaluate("for (const _ of [1, 2]) document.getElementById('go').click()")
    played(page, "#fill", 8)
    assert page.locator("#fill .text .masked:visible").count() == 0
    expect(page.locator("#fill > .note")).to_contain_text("tokens were written again")


def test_a_text_is_not_given_up_for_another_choice_of_model(service: Service, opened: Any) -> None:
    page = ready(opened(service.address, reduced_motion="reduce"))
    page.fill("#steps", "16")
    chosen = "document.getElementById('model').dispatchEvent(new Event('change'))"
    page.evaluate(f"document.getElementById('go').click(); {chosen}")
    played(page, "#write", 16)
    expect(page.locator("#go")).not_to_have_attribute("aria-busy", "true")


def test_what_is_given_up_is_shown_no_further(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.evaluate("for (const id of ['go', 'take']) document.getElementById(id).click()")
    expect(page.locator("#status")).to_have_text("The text is ready: select words.")
    expect(page.locator("#write .player")).to_be_hidden()

    page.click("#tab-fill")
    text = text_of(page, "#fill")
    page.locator("#fill .text .token:not([hidden])").first.click()
    page.evaluate("for (const id of ['go', 'tab-write', 'go']) document.getElementById(id).click()")
    played(page, "#write", 8)
    page.click("#tab-fill")
    assert text_of(page, "#fill") == text


def test_words_are_dragged_over(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.click("#tab-fill")
    page.fill("#own", "The cat sat on the mat.")
    page.click("#take")
    expect(page.locator("#fill .text")).to_have_text("The cat sat on the mat.")
    first, last = (page.locator("#fill .text .token:not([hidden])").nth(n).bounding_box() for n in (0, 4))
    page.mouse.move(first["x"] + 1, first["y"] + first["height"] / 2)
    page.mouse.down()
    page.mouse.move(last["x"] + last["width"] - 1, last["y"] + last["height"] / 2, steps=5)
    page.mouse.up()
    assert page.locator("#fill .text .token.chosen").count() >= 5


def test_words_are_kept_by_keyboard_and_the_rest_is_redrawn(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.click("#tab-fill")
    page.fill("#own", "The cat sat on the mat.")
    page.click("#take")
    expect(page.locator("#fill .text")).to_have_text("The cat sat on the mat.")
    page.get_by_role("button", name="Keep selection").press("Enter")
    page.locator("#fill .text .token[tabindex='0']").focus()
    page.keyboard.press("Space")
    page.keyboard.press("Shift+ArrowRight")
    kept = page.locator("#fill .text .token.chosen").all_inner_texts()
    assert "".join(kept) == "Thecat"
    expect(page.locator("#fill .text .token.chosen").first).to_have_attribute("aria-checked", "true")
    page.click("#go")
    played(page, "#fill", 8)
    assert text_of(page, "#fill").startswith("The cat")
    assert text_of(page, "#fill") != "The cat sat on the mat."
    written = page.locator("#fill .text .written").count()
    assert written == page.locator("#fill .text .token").count() - len(kept) - 2  # begin and end


def test_a_written_text_is_taken_over_to_fill_in(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.click("#go")
    played(page, "#write", 8)
    text = text_of(page, "#write")
    page.get_by_role("button", name="Fill in parts of this text").click()
    expect(page.locator("#tab-fill")).to_have_attribute("aria-selected", "true")
    assert text_of(page, "#fill") == text


def test_noise_decides_and_a_slider_goes_from_one_to_another(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.click("#tab-noise")
    page.fill("#steps", "2")
    page.click("#go")
    expect(page.locator("#way")).to_be_enabled()
    row = "one => [one.querySelector('button'), ...one.querySelectorAll('td')].map(cell => cell.textContent)"
    rows = page.locator("#noise .bars tbody tr").evaluate_all(f"all => all.map({row})")
    shares = {name: [int(share.rstrip("%")) for share in found] for name, *found in rows}
    assert set(shares) == {"noisy", "plain", "whole"}
    assert shares["plain"][0] == shares["whole"][0] == 0  # a single mask has no noise to change
    assert shares["noisy"][0] > 0
    assert min(new for _, new in shares.values()) > 0
    expect(page.locator("#policies-said")).to_have_text(re.compile(r"\d+% of the written tokens differ"))

    first = text_of(page, "#noise", 5)
    expect(page.locator("#way-said")).to_have_text(
        re.compile(r"100% of the tokens as at ε₁, \d+% as at ε₂; 0 flip here")
    )
    assert page.locator("#noise .flips i").count() == 33
    flips = page.locator("#noise .flips i.some").count()
    assert flips > 0
    page.locator("#way").fill("32")
    expect(page.locator("#way-said")).to_have_text(re.compile(r"\d+% of the tokens as at ε₁, 100% as at ε₂"))
    assert text_of(page, "#noise", 5) != first
    at = page.locator("#noise .flips i").evaluate_all("all => all.findIndex(one => one.classList.contains('some'))")
    page.locator("#way").fill(str(at))
    marked = page.locator("#noise .text").nth(5).locator(".changed").count()
    expect(page.locator("#way-said")).to_contain_text(f"; {marked} flip here")
    assert marked > 0
    shot(page, "noise")

    page.locator("#noise .bars button", has_text="plain").click()
    expect(page.locator("#noise h3", has_text="Same draws, new ε")).to_contain_text("0% changed")
    page.select_option("#model", "plain")
    page.click("#go")
    expect(page.locator("#way-said")).to_contain_text("carries no noise")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(390, 844), (768, 1024), (1600, 1000)])
def test_any_width_dark_and_light(service: Service, opened: Any, width: int, height: int, scheme: str) -> None:
    """That nothing overflows is checked when the page is closed."""
    page = ready(opened(service.address, width, height, color_scheme=scheme))
    for panel in ("write", "beside", "fill", "noise"):
        page.click(f"#tab-{panel}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.click("#tab-write")
    page.click("#go")
    played(page, "#write", 8)
    expect(page.locator("#write .text")).to_be_in_viewport()
    assert page.locator("#write .text").bounding_box()["width"] <= min(width, 700)
    shot(page, f"write-{width}-{scheme}")


def test_tabs_by_keyboard_and_no_motion_where_none_is_wanted(service: Service, opened: Any) -> None:
    page = ready(opened(service.address, reduced_motion="reduce"))
    page.locator("#tab-write").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-beside")).to_be_focused()
    expect(page.locator("#beside")).to_be_visible()
    for pressed, found in (("End", "noise"), ("ArrowRight", "write"), ("ArrowLeft", "noise"), ("Home", "write")):
        page.keyboard.press(pressed)
        expect(page.locator(f"#tab-{found}")).to_be_focused()
        expect(page.locator(f"#{found}")).to_be_visible()
    page.locator("#prompt").press("Control+Enter")
    played(page, "#write", 8)
    assert page.locator("#write .text .token").first.evaluate("one => getComputedStyle(one).transitionDuration") == "0s"
    for field in page.locator("input:visible, select:visible, textarea:visible").all():
        assert field.evaluate("one => one.labels?.length || one.ariaLabel"), "a field without a name"


def test_what_goes_wrong_is_a_sentence(service: Service, opened: Any) -> None:
    page = ready(opened(service.address, failing=True))
    page.fill("#prompt", "word " * 200)
    with page.expect_response("**/play/write"):
        page.click("#go")
    expect(page.get_by_role("alert")).to_have_text(
        re.compile(r"The prompt has \d+ tokens; with 96 in all there is no room to write\.")
    )
    page.fill("#prompt", "The cat")
    page.click("#go")
    expect(page.get_by_role("alert")).to_be_hidden()
    played(page, "#write", 8)


def test_what_goes_wrong_is_brought_into_view(service: Service, opened: Any) -> None:
    page = ready(opened(service.address, 1200, 700, failing=True))
    page.click("#tab-noise")
    page.click("#go")
    expect(page.locator("#way")).to_be_enabled()
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    expect(page.locator("#problem")).not_to_be_in_viewport()
    page.locator("#prompt").evaluate("one => { one.value = 'word '.repeat(200) }")
    page.click("#go")
    expect(page.get_by_role("alert")).to_contain_text("there is no room to write")
    expect(page.get_by_role("alert")).to_be_in_viewport(ratio=1)


JUDGE_BUSY = {"error": {"message": "16 texts wait for a judge, the limit; try again later"}}


def test_a_judge_that_fails_leaves_the_text(service: Service, opened: Any) -> None:
    """Only its figure is missing, and a note says why."""
    page = ready(opened(service.address, failing=True))
    page.route("**/play/judge", lambda route: route.fulfill(status=429, json=JUDGE_BUSY))
    for panel, many in (("write", 1), ("beside", 2)):
        page.click(f"#tab-{panel}")
        page.click("#go")
        played(page, f"#{panel}", 8)
        assert page.locator(f"#{panel} .text .masked:visible").count() == 0
        for side in page.locator(f"#{panel} .figures").all():
            expect(side.locator(".note")).to_have_text("16 texts wait for a judge, the limit; try again later.")
            expect(side.locator("dd").last).to_have_text("–")
        assert page.locator(f"#{panel} .figures").count() == many
        expect(page.get_by_role("alert")).to_be_hidden()
    page.click("#tab-fill")
    page.locator("#fill .text .token:not([hidden])").first.click()
    page.click("#go")
    played(page, "#fill", 8)
    expect(page.locator("#fill .figures .note")).to_contain_text("16 texts wait for a judge")


def test_a_way_that_ends_early_can_be_walked_as_far_as_it_came(service: Service, opened: Any) -> None:
    page = ready(opened(service.address, failing=True))
    said = 'event: error\ndata: {"message": "the request took too long"}\n\n'

    def broken(route: Any) -> None:
        events = route.fetch().text().split("\n\n")[:5]  # both ends, and three points between them
        body = "".join(f"{event}\n\n" for event in events) + said
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/play/path", broken)
    page.click("#tab-noise")
    page.fill("#steps", "2")
    page.click("#go")
    expect(page.get_by_role("alert")).to_have_text("the request took too long")
    slider = page.locator("#way")
    expect(slider).to_be_enabled()
    expect(slider).to_have_attribute("max", "4")
    assert page.locator("#noise .flips i").count() == 5
    texts = set()
    slider.focus()
    for place in (0, 25, 50, 75, 100):
        expect(slider).to_have_attribute("aria-valuetext", re.compile(f"^{place}% of the way; "))
        texts.add(text_of(page, "#noise", 5))
        page.keyboard.press("ArrowRight")
    assert len(texts) > 1
    expect(page.locator("#way-said")).to_contain_text("100% as at ε₂")


def test_a_way_has_fewer_points_where_each_takes_longer(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.click("#tab-noise")
    asked = list[int]()
    page.on("request", lambda sent: sent.url.endswith("/play/path") and asked.append(sent.post_data_json["points"]))
    for steps, points in (("9", 17), ("33", 9)):
        page.fill("#steps", steps)
        page.click("#go")
        expect(page.locator("#noise .flips i")).to_have_count(points)
        expect(page.locator("#way")).to_be_enabled()
        expect(page.locator("#way")).to_have_attribute("max", str(points - 1))
    assert asked == [17, 9]


def test_a_text_that_was_edited_is_the_one_that_is_filled_in(service: Service, opened: Any) -> None:
    page = ready(opened(service.address))
    page.click("#tab-fill")
    expect(page.locator("#fill .text")).to_contain_text("Once upon a time")
    words = page.locator("#fill .text .token:not([hidden])")
    words.first.click()
    page.fill("#own", "The cat sat on the mat.")
    page.click("#go")
    expect(page.locator("#fill .text")).to_have_text("The cat sat on the mat.")
    expect(page.locator("#fill > .note")).to_contain_text("This is your text as it is now: select words")
    words.first.click()
    page.click("#go")
    played(page, "#fill", 8)
    assert text_of(page, "#fill").endswith(" cat sat on the mat.")
    page.fill("#own", "A dog saw it.")
    page.select_option("#model", "plain")  # the same tokens
    page.click("#go")
    expect(page.locator("#fill .text")).to_have_text("A dog saw it.")


@pytest.mark.parametrize("panel", ["write", "beside", "fill", "noise"])
def test_the_button_is_in_view_on_a_small_screen(service: Service, opened: Any, panel: str) -> None:
    page = ready(opened(service.address, 1366, 650))
    page.click(f"#tab-{panel}")
    expect(page.locator("#go")).to_be_in_viewport(ratio=1)
    for field in page.locator("#settings").locator("input:visible, select:visible, textarea:visible").all():
        field.focus()  # scrolls the column, and nothing lies above the field
        seen = "one => document.elementFromPoint(box.x + box.width / 2, box.bottom - 2) === one"
        assert field.evaluate(f"one => {{ const box = one.getBoundingClientRect(); return ({seen})(one) }}")
    shot(page, f"small-{panel}")


def test_a_service_that_is_gone_is_a_sentence(opened: Any) -> None:
    with Service() as passing:
        page = ready(opened(passing.address, failing=True))
    page.click("#go")
    expect(page.get_by_role("alert")).to_have_text("The service does not answer. Is it still running?")
    expect(page.locator("#write .player")).to_be_hidden()


def test_a_key_is_asked_for_where_one_is_wanted(opened: Any) -> None:
    with Service(api_key="open sesame") as locked:
        page = opened(locked.address, failing=True)
        alert = page.get_by_role("alert")
        expect(alert).to_have_text(
            "This service asks for a key: enter it under “Key of this service”, then press Write."
        )
        expect(page.locator("#key")).to_be_focused()
        page.fill("#key", "close sesame")
        page.press("#key", "Enter")
        expect(alert).to_contain_text("This key is wrong: enter it")
        page.fill("#key", "open sesame")
        page.click("#go")  # loads the models, and writes
        played(page, "#write", 8)
        expect(alert).to_be_hidden()


def test_a_key_that_is_given_late_brings_the_text_to_fill_in(opened: Any) -> None:
    with Service(api_key="open sesame") as locked:
        page = opened(locked.address, failing=True)
        expect(page.get_by_role("alert")).to_contain_text("asks for a key")
        page.click("#tab-fill")
        page.fill("#key", "open sesame")
        page.click("#go")
        expect(page.locator("#fill .text")).to_contain_text("Once upon a time")
        expect(page.locator("#fill > .note")).to_have_text("Nothing is selected yet.")
        expect(page.get_by_role("alert")).to_be_hidden()


COLOURS = """all => all.map(one => {
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    canvas.fillStyle = getComputedStyle(one)[one.tagName === 'BODY' ? 'backgroundColor' : 'color'];
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(part => part / 255);
})"""
# How those see colours who lack one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1), in linear light.
EYES = {
    "all cones": np.eye(3),
    "no red": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    "no green": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
    "no blue": np.array([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]),
}


def linear(colours: list[list[float]]) -> np.ndarray:
    given = np.array(colours)
    return np.where(given <= 0.04045, given / 12.92, ((given + 0.055) / 1.055) ** 2.4)


def in_lab(light: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear sRGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = light.clip(0, 1) @ to_xyz.T / to_xyz.sum(1)
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], -1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read_and_told_apart_by_all_eyes(service: Service, opened: Any, scheme: str) -> None:
    page = ready(opened(service.address, color_scheme=scheme))
    page.fill("#steps", "4")
    page.click("#go")
    steps = linear(page.locator("#write .legend .written").evaluate_all(COLOURS))
    (paper,) = linear(page.locator("body").evaluate_all(COLOURS))
    weights = np.array([0.2126, 0.7152, 0.0722])
    for light in steps:
        bright, dark = sorted([float(light @ weights), float(paper @ weights)], reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5  # WCAG, for text
    for eyes, seen in EYES.items():
        lab = in_lab(steps @ seen.T)
        apart = np.linalg.norm(lab[:, None] - lab[None], axis=-1)[np.triu_indices(4, 1)]
        assert apart.min() > 10, f"{eyes}: {apart.round(1)}"


def test_another_models_tokens_are_read_anew(opened: Any) -> None:
    """A row of ids means nothing to a model with another tokenizer; its text does."""
    tokenizer = train_bpe(["the hill, the house, the night"] * 5, 300)
    model = tiny_model(4, vocab_size=len(tokenizer), mask_token_id=MASK, length=96)
    with Service(models=writers(96) | {"other": Writer(model, tokenizer)}) as service:
        page = opened(service.address)
        expect(page.locator("#model option")).to_have_count(4)
        page.select_option("#model", "noisy")
        page.click("#tab-fill")
        expect(page.locator("#fill .text")).to_contain_text("Once upon a time")
        text, many = text_of(page, "#fill"), page.locator("#fill .text .token").count()
        page.locator("#fill .text .token:not([hidden])").first.click()
        page.select_option("#model", "plain")  # the same tokens: what is selected stays selected
        expect(page.locator("#fill .text .chosen")).not_to_have_count(0)
        page.select_option("#model", "other")
        expect(page.locator("#fill .text .chosen")).to_have_count(0)
        assert text_of(page, "#fill") == text
        assert page.locator("#fill .text .token").count() == len(service.engine.writers["other"].framed(text)) != many
