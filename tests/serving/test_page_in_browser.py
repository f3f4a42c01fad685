"""The page in Chromium: every feature at two widths, light and dark, by mouse and by keyboard.

A server with small random models of every kind answers.
"""

import re
import shutil
import subprocess

import pytest

from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import (
    BareModel,
    OptionScorer,
    PreTrainingModel,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)

from ..tiny import piece_tokenizer, random_model, write
from .browser_tools import Visit, contrast
from .serving_tools import server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?<>/=()'-"
TOKENIZER = piece_tokenizer(" ".join([*LETTERS, *(f"##{letter}" for letter in LETTERS)]))
CONFIG = ModelConfig(len(TOKENIZER.vocabulary), 64, 2, 2, 64, 256)
EVIL = "<script>hacked=1</script><img src=x onerror=hacked=1>"
MODELS = {  # name: head, its outputs, what else is written
    "reviews": (SequenceClassifier, 2, {"label_names": (EVIL, "good")}),
    "rival": (SequenceClassifier, 2, {"label_names": ("bad", "good"), "seed": 3}),
    "pairs": (SequenceClassifier, 1, {"run": {"task": "stsb"}}),
    "topics": (
        SequenceClassifier, 3,
        {"label_names": ("sport", "war", "art"), "extra_config": {"kind": "multilabel"}},
    ),
    "books": (PreTrainingModel, None, {}),
    "ner": (TokenClassifier, 3, {"label_names": ("O", "B-PER", "I-PER")}),
    "squad": (SpanPredictor, 2, {}),
    "squad2": (
        SpanPredictor, 2,
        {"extra_config": {"kind": "answer", "thresholds": {"null_threshold": -99.0}}},
    ),
    "swag": (OptionScorer, 1, {}),
    "vectors": (BareModel, None, {}),
}  # fmt: skip
REPORT = """<!doctype html><title>a report</title><style>p { color: rgb(1, 2, 3) }</style>
<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw="><p>by itself</p><script>
document.title = "it ran"
fetch("/v1/models").then(() => document.title = "it asked", () => {})
try { document.title += sessionStorage.length } catch { document.title += ", alone" }
</script>"""
KEY = "open-sesame"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, (head, outputs, written) in MODELS.items():
        sizes = () if outputs is None else (outputs,)
        random_model(folder / name, TOKENIZER, head, *sizes, config=CONFIG, std=0.2, **written)
    write(folder / "reviews" / "report.html", REPORT)
    return folder


@pytest.fixture(scope="module")
def address(folders):
    with server(*(f"{name}={folders / name}" for name in MODELS), "--log", "errors") as served:
        yield served.address


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


def test_contrast_is_that_of_the_standard():
    grey = {"colour": [0.5, 0.5, 0.5, 1], "grounds": [[0, 0, 0, 0], [1, 1, 1, 1]]}
    assert contrast(grey | {"colour": [0, 0, 0, 1]}) == pytest.approx(21)
    assert contrast(grey) == pytest.approx(3.98, abs=0.01)  # as WebAIM's checker has #808080
    assert contrast(grey | {"colour": [0, 0, 0, 0.5]}) == pytest.approx(3.98, abs=0.01)


@pytest.fixture(scope="module", params=["light", "dark"])
def scheme(request):
    return request.param


@pytest.fixture(scope="module", params=[1280, 390])
def visit(request, browser, address, scheme):
    found = Visit(browser, address, request.param, scheme)
    found.done()
    yield found
    found.close()


def test_it_is_there_within_a_second(browser, address):
    visit = Visit(browser, address)
    visit.done()
    paints = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    assert visit.page.evaluate(paints) < 1000
    assert visit.page.get_by_text("Try one").count() == 1
    visit.close()


def test_classes_and_words(visit):
    visit.tab("Classify")
    visit.choose("Model", "reviews")
    visit.page.get_by_role("button", name="A fine film, warm and wise.").click()
    visit.settle()
    assert "good" in visit.result and "Occlusion: how far" in visit.result
    assert visit.page.locator("mark.word").count() == 8  # six words, a comma and a stop
    for name, measure in (("Gradient × input", "Gradient x input"), ("Rollout", "rollout")):
        visit.press(name)
        assert measure in visit.result
    assert "speaks against" not in visit.result  # rollout has no direction
    visit.press("Occlusion")
    visit.choose("Words for the label", "good")
    assert "mattered for “good”" in visit.result
    visit.press("Off")
    assert visit.page.locator("mark.word").count() == 0
    visit.press("Occlusion")
    visit.ask(Text=f"{EVIL} 😀 fine")  # words keep their places after it
    assert EVIL in visit.result  # of the text and of the label's name
    assert visit.page.locator("mark.word").last.inner_text() == "fine"


def test_two_models_beside_each_other(visit):
    visit.tab("Classify")
    visit.choose("Model", "reviews")
    visit.choose("Compare with", "rival")
    visit.ask(Text="a fine film")
    names = visit.page.locator("#result h2").all_inner_texts()
    assert names == ["reviews", "rival"]
    assert visit.page.locator("#result .bars").count() == 4
    visit.choose("Compare with", "")
    assert visit.page.locator("#result h2").count() == 0


def test_labels_and_a_score_of_two_texts(visit):
    visit.tab("Classify")
    visit.choose("Model", "topics")
    visit.ask(Text="a fine film")
    assert all(label in visit.result for label in ("sport", "war", "art", "of its own"))
    visit.choose("Model", "pairs")
    visit.ask(First_text="a man sings.", Second_text=EVIL)
    assert "Score" in visit.result and EVIL in visit.result
    visit.choose("Model", "reviews")


def test_masks(visit):
    visit.tab("Fill")
    visit.ask(**{"Text_with_[MASK]": "the [MASK] sat on the [MASK]."})
    assert "Mask 2 of 2" in visit.result and visit.page.locator(".bars li").count() == 10
    visit.press("All together")
    assert "Likeliest fillings" in visit.result and " … " in visit.result
    visit.choose("Words to show", "10")
    assert visit.page.locator(".bars li").count() == 10
    visit.page.get_by_role("button", name="Insert [MASK]").click()
    assert visit.page.get_by_label("Text with [MASK]").input_value().count("[MASK]") == 3
    visit.ask(**{"Text_with_[MASK]": f"{EVIL} [MASK]"})
    assert EVIL in visit.result


def test_an_answer_in_its_context(visit):
    visit.tab("Answer")
    visit.choose("Model", "squad")
    visit.ask(Question="who left?", Context=f"😀 ann left rome. {EVIL}")
    answer = visit.page.locator("#result .figure")
    assert answer.inner_text() == visit.page.locator("#result mark").inner_text()
    assert EVIL in visit.result and "everything else" in visit.result
    visit.choose("Model", "squad2")  # which always finds that there is none
    assert "No answer in this context" in visit.result and EVIL in visit.result
    assert "“No answer” scores" in visit.result
    assert visit.page.locator("#result mark").count() == 0


def test_entities(visit):
    visit.tab("Entities")
    visit.ask(Text=f"😀 ann smith left rome. {EVIL}")
    assert EVIL in re.sub(r"\s?PER|\n", "", visit.result) and "PER" in visit.result
    visit.page.get_by_text("words with their tags").click()
    assert "B-PER" in visit.result
    visit.check()


def test_a_choice(visit):
    visit.tab("Choose")
    visit.ask(Beginning="he opens the door", **{"Options,_one_a_line": f"and enters\n\n{EVIL}"})
    assert visit.page.locator(".bars li").count() == 2 and EVIL in visit.result
    visit.page.get_by_label("Options, one a line").fill("and enters")
    visit.page.get_by_role("button", name="Ask", exact=True).click()
    visit.page.wait_for_selector("#error:not(:empty)")
    assert "two options" in visit.error and visit.result == ""
    visit.ask(**{"Options,_one_a_line": "a\nb"})
    assert visit.error == ""


def test_tokens_mark_their_characters(visit):
    visit.tab("Tokens")
    visit.ask(Text="😀 ab <b>")
    chips = visit.page.locator(".chip")
    assert chips.count() == 8  # [CLS] [UNK] a ##b < b > [SEP]
    assert chips.nth(3).get_attribute("aria-label").startswith("##b, id ")
    assert chips.nth(3).get_attribute("aria-label").endswith("characters 3–4")
    for look in (chips.nth(3).focus, chips.nth(3).hover):
        look()
        assert visit.page.locator(".place.on").all_inner_texts() == ["b"]
    chips.nth(0).focus()
    visit.check()
    assert visit.page.locator(".place.on").count() == 0


def test_attention_and_a_masked_token(visit):
    visit.tab("Attention")
    visit.choose("Model", "vectors")
    visit.ask(Text="a b <")
    assert visit.page.locator(".lines line").count() > 5
    visit.page.locator("#token-vectors-1").hover()
    assert visit.page.locator(".looking line.on").count() >= 1
    assert "a reads " in visit.result
    before = visit.page.locator("#result").inner_html()
    visit.choose("Layer", "1")
    visit.choose("Head", "2")
    assert visit.page.locator("#result").inner_html() != before
    visit.page.locator("#token-vectors-2").click()
    visit.settle()
    assert visit.page.locator("#token-vectors-2").inner_text() == "[MASK]"
    assert visit.page.evaluate("document.activeElement.id") == "token-vectors-2"
    visit.press("Matrix")
    assert visit.page.locator(".heat tbody td").count() == 25
    rows = visit.page.locator(".heat tbody tr").all()
    for row in rows:  # each is a distribution
        weights = [float(weight) for weight in row.locator("td").all_inner_texts()]
        assert sum(weights) == pytest.approx(1, abs=5 * 0.0005 + 5 * 0.00005)
    visit.press("Rollout")
    assert "share in [CLS]" in visit.result and visit.page.locator(".bars li").count() == 5
    visit.page.locator("#token-vectors-2").click()
    visit.settle()
    assert visit.page.locator("#token-vectors-2").inner_text() == "b"
    visit.press("Lines")
    visit.ask(Text="a b c d e f g h i j " * 9)  # more than are shown
    assert visit.page.locator("#result button.token").count() == 64
    assert "The first 64 tokens" in visit.result


def test_similar_sentences_and_search(visit):
    visit.tab("Similarity")
    visit.ask(**{"Sentences,_one_a_line": f"a man sings\n{EVIL}\na man sings"})
    cells = visit.page.locator(".heat td").all_inner_texts()[1:]
    assert len(cells) == 9 and cells[0] == cells[2] == cells[4] == "1.00"  # 1 and 3 are alike
    assert cells[1] == cells[3] != "1.00" and EVIL in visit.result
    assert "Most alike: 1 and 3" in visit.result
    visit.tab("Search")
    visit.ask(Look_for="a dog", Lines_to_search=f"{EVIL}\na dog\na cat")
    first = visit.page.locator(".bars li").first.inner_text()
    assert "a dog" in first and "1.000" in first and EVIL in visit.result


def test_models_and_their_reports(visit):
    visit.tab("Models")
    assert all(name in visit.result for name in MODELS)
    visit.check()
    with visit.context.expect_page() as opened:
        visit.page.get_by_role("link", name="report.html").click()
    report = opened.value
    report.wait_for_load_state("networkidle")
    assert report.title() == "it ran, alone"  # scripts run, and reach neither server nor key
    colour = report.locator("p").evaluate("own => getComputedStyle(own).color")
    assert colour == "rgb(1, 2, 3)"
    report.close()


def test_routes_with_a_command_that_runs(visit):
    visit.tab("API")
    visit.page.get_by_text("/v1/classify", exact=True).click()
    visit.check()
    visit.page.get_by_role("button", name="Copy curl").locator("visible=true").click()
    visit.page.get_by_text("Copied", exact=True).wait_for()
    command = visit.page.evaluate("navigator.clipboard.readText()")
    if shutil.which("curl"):
        ran = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert '"answers"' in ran.stdout, ran


def test_a_theme_is_kept(visit, scheme):
    other = {"light": "dark", "dark": "light"}[scheme]
    ground = "getComputedStyle(document.body).backgroundColor"
    before = visit.page.evaluate(ground)
    visit.page.get_by_label("Theme").select_option(other)
    assert visit.page.evaluate(ground) != before
    visit.page.reload()
    visit.done()
    visit.check()
    assert visit.page.evaluate(ground) != before
    visit.page.get_by_label("Theme").select_option("light dark")
    assert visit.page.evaluate(ground) == before


def test_a_link_holds_everything(browser, address):
    visit = Visit(browser, address)
    visit.tab("Attention")
    visit.choose("Model", "books")
    visit.choose("Compare with", "vectors")
    visit.ask(Text="a & b = c # d? é 😀")
    visit.press("Matrix")
    visit.page.locator("#head-books").select_option("2")
    visit.settle()
    visit.page.locator("#token-books-3").click()
    visit.settle()
    visit.page.get_by_role("button", name="Copy link").click()
    visit.page.get_by_text("Copied", exact=True).wait_for()
    link, seen = visit.page.evaluate("navigator.clipboard.readText()"), visit.result
    assert link == visit.page.url and "[MASK]" in seen
    other = Visit(browser, address)
    other.page.goto(link)
    other.page.reload()
    other.settle()
    assert other.result == seen
    assert other.page.get_by_label("Text", exact=True).input_value() == "a & b = c # d? é 😀"
    visit.page.go_back()
    visit.settle()
    assert "[MASK]" not in visit.result
    visit.page.go_forward()
    visit.settle()
    assert visit.result == seen
    other.close()
    visit.close()


@pytest.mark.parametrize(
    "link",
    ["#nothing", "#?", "#fill?model=x&versus=y&mode=z&top=-1", "#tokens?__proto__=a&%E0%A4%A=%"],
)
def test_a_link_of_what_is_not_here_shows_the_beginning(browser, address, link):
    visit = Visit(browser, address + "/" + link)
    visit.done()
    assert "Try one" in visit.result and visit.error == ""
    visit.context.close()


def test_the_back_button_leads_to_the_tab_before(browser, address):
    visit = Visit(browser, address)
    visit.tab("Tokens")
    visit.ask(Text="a b")
    visit.ask(Text="a b c")
    visit.tab("Search")
    visit.page.go_back()
    visit.settle()
    assert visit.page.locator(".chip").count() == 5
    visit.page.go_back()
    visit.settle()
    assert visit.page.locator(".chip").count() == 4
    visit.page.get_by_label("Text", exact=True).fill("a b c d")  # what is not asked is kept as well
    visit.page.wait_for_url("**a+b+c+d")
    visit.page.reload()
    visit.settle()
    assert visit.page.get_by_label("Text", exact=True).input_value() == "a b c d"
    visit.close()


def test_the_keyboard_alone(browser, address):
    visit = Visit(browser, address)
    visit.done()
    keyboard = visit.page.keyboard
    focused = "document.activeElement.id"
    ring = """() => [document.activeElement, document.activeElement.nextElementSibling]
      .some((own) => own && getComputedStyle(own).outlineStyle === "solid")"""

    def step(key="Tab"):
        """Where a key leads; there it can be seen, of a radio button on its text."""
        keyboard.press(key)
        assert visit.page.evaluate(ring)
        return visit.page.evaluate(focused)

    assert step() == "theme"
    assert step() == "tab-classify"
    assert step("End") == "tab-api"
    assert step("ArrowRight") == "tab-classify"  # round
    assert step("ArrowLeft") == "tab-api"
    assert step("Home") == "tab-classify"
    for name in ("model", "versus", "field-text"):
        assert step() == name
    keyboard.type("a fine film")
    keyboard.press("Control+Enter")
    visit.page.wait_for_selector("#status:not(:empty)")
    assert step() == "field-method-occlusion"
    assert step("ArrowRight") == "field-method-gradient"
    visit.page.get_by_text("Gradient x input: how").wait_for()
    while step() != "ask":
        pass
    while step("Shift+Tab") != "tab-classify":
        pass
    while step("ArrowRight") != "tab-attention":
        pass
    while step() != "field-text":
        pass
    keyboard.type("a b c")
    keyboard.press("Control+Enter")
    visit.page.wait_for_selector("#status:not(:empty)")
    while not step().startswith("token-"):
        pass
    assert "[CLS] reads" in visit.result
    step()
    keyboard.press("Enter")
    visit.settle()
    assert visit.page.evaluate(focused) == "token-reviews-1"
    assert visit.page.locator("#token-reviews-1").inner_text() == "[MASK]"
    keyboard.press("Space")
    visit.settle()
    assert visit.page.locator("#token-reviews-1").inner_text() == "a"
    visit.close()


def test_every_control_has_a_name(browser, address):
    visit = Visit(browser, address)
    unnamed = """() => [...document.querySelectorAll("button, input, select, textarea, [role=img]")]
      .filter((own) => own.checkVisibility() && !own.labels?.length && !own.textContent.trim()
        && !own.getAttribute("aria-label")).map((own) => own.outerHTML)"""
    for tab in visit.page.get_by_role("tab").all_inner_texts():
        visit.tab(tab)
        assert visit.page.evaluate(unnamed) == []
        panel = visit.page.get_by_role("tabpanel", name=tab)
        assert panel.count() == 1
    visit.close()


def test_refusals_are_told_and_the_page_stays(folders, browser):
    keys = write(folders / "keys", KEY)
    with server(folders / "reviews", "--api-key-file", keys, "--log", "errors") as served:
        visit = Visit(browser, served.address, reduced_motion="reduce")
        visit.page.wait_for_selector("#error:not(:empty)")
        assert "no valid key" in visit.error
        assert visit.page.evaluate("document.activeElement.id") == "key-field"
        for key in ("wrong", KEY):
            visit.page.get_by_label("API key").fill(key)
            visit.page.get_by_role("button", name="Use key").click()
            if key == "wrong":
                visit.page.get_by_text("This key is not valid here.").wait_for()
        visit.tab("Tokens")
        visit.page.get_by_label("Text", exact=True).fill("a b")
        visit.page.keyboard.press("Control+Enter")
        visit.page.wait_for_selector(".chip")
        visit.page.reload()  # the key is kept, and no address has it
        visit.page.wait_for_selector(".chip")
        assert KEY not in visit.page.url and not visit.page.get_by_label("API key").is_visible()
        moving = "getComputedStyle(document.getElementById('result')).transitionDuration"
        assert visit.page.evaluate(moving) == "0s"
        visit.tab("Models")
        with visit.page.expect_download() as saved:
            visit.page.get_by_role("link", name="report.html (save)").click()
        assert saved.value.path().read_text() == REPORT
        visit.tab("API")
        assert KEY not in visit.page.content() and "$KEY" in visit.page.content()
        visit.tab("Classify")
        visit.page.get_by_label("Text", exact=True).fill("...")
        visit.page.get_by_role("button", name="Ask", exact=True).click()
        visit.page.wait_for_selector("#status:not(:empty)")
        served.end()
    visit.page.get_by_label("Text", exact=True).fill("more")
    visit.page.get_by_role("button", name="Ask", exact=True).click()
    visit.page.get_by_text("The server does not answer").wait_for()
    assert visit.page.get_by_label("Text", exact=True).input_value() == "more"
    assert visit.page.get_by_role("tab").count() == 7
    visit.context.close()
