"""The report in a real browser: Chromium opens the file from disk, offline, and a person's moves are made."""

import base64
import io
import json
import os
import re
import shutil
import socket
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

import circuitscope as cs
from circuitscope.training.trainer import train
from circuitscope.viz.report import report
from circuitscope.viz.report.document import page as assembled
from tiny_run import tiny

pytestmark = pytest.mark.slow

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
NASTY = "<script>alert(1)<script><img src=x onerror=alert(2)>\"'&"
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if sync_playwright is None or CHROMIUM is None:
        missing = "playwright" if sync_playwright is None else "Chromium (Debian's package chromium, or $CHROMIUM)"
        line = f"THE REPORT WAS NOT TESTED IN A BROWSER: there is no {missing} on this machine"
        warnings.warn(line, stacklevel=1)
        pytest.skip(line)
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield started
        started.close()


@pytest.fixture
def show(browser):
    """Opens a file as a person would; at the end there were no errors, no dialogs and no requests."""
    yield from shower(browser)


def shower(browser):
    contexts, wrong = [], []

    def show(path, width=1280, height=900, scheme="light"):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce", offline=True
        )
        contexts.append(context)
        view = context.new_page()
        view.on("console", lambda m: wrong.append(f"console {m.type}: {m.text}"))
        view.on("pageerror", lambda e: wrong.append(f"error: {e}"))
        view.on("request", lambda r: r.url == path.as_uri() or wrong.append(f"request: {r.url}"))
        view.on("dialog", lambda d: (wrong.append(f"dialog: {d.message}"), d.dismiss()))
        view.goto(path.as_uri())
        view.wait_for_selector("html[data-ready]")
        settle(view)
        return view

    yield show
    for context in contexts:
        context.close()
    assert not wrong


def settle(view):
    """Until the next picture is on the screen."""
    for busy in view.locator("[aria-busy=true]").all():
        busy.wait_for(state="detached")
    view.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def pixels(view, number=0) -> np.ndarray:
    """The heatmap as it is drawn, without what hovering lays over it."""
    canvas = view.locator(".heatmap canvas:first-child").nth(number)
    text = canvas.evaluate("(canvas) => canvas.toDataURL()").split(",")[1]
    return np.array(Image.open(io.BytesIO(base64.b64decode(text))))


def slide(view, at, number=0):
    view.locator("input[type=range]").nth(number).fill(str(at))
    settle(view)


def step_shown(view, number=0) -> int:
    return int(view.locator("output.step").nth(number).inner_text().removeprefix("step "))


def pick(view, name, number=0):
    return view.locator(".run").nth(number).get_by_label(name, exact=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def attention(root):
    return train(tiny(n_heads=2, lr=0.05), root=root, name="attention")


@pytest.fixture(scope="module")
def mamba(root):
    config = cs.RunConfig.build(
        "mamba", "mqar", n_layers=1, d_model=16, length=16, pairs=2, vocab_size=64, batch_size=8, steps=8, lr=0.05,
        eval_every=4, eval_batches=2, eval_batch_size=8, log_every=2, save_every=4, threads=1, device="cpu",
    )  # fmt: skip
    return train(config, root=root, name="mamba")


@pytest.fixture(scope="module")
def single(attention, root):
    return report(attention, sequences=16).save(root / "single.html")


@pytest.fixture(scope="module")
def double(attention, mamba, root):
    return report([attention, mamba], sequences=16).save(root / "double.html")


def test_the_slider_changes_the_picture_the_cursor_and_the_numbers(show, single, attention):
    view = show(single)
    held = attention.metrics[attention.metrics.split == "validation"].set_index("step")
    pictures, cursors = [], []
    for at in range(len(attention.steps)):
        slide(view, at)
        assert step_shown(view) == attention.steps[at]
        pictures.append(pixels(view))
        cursors.append(float(view.locator("line.cursor").first.get_attribute("x1")))
        if attention.steps[at] in held.index:
            shown = view.locator(".chart").first.locator("b").nth(1).inner_text()
            assert float(shown) == pytest.approx(held.loss[attention.steps[at]], rel=0.01)
    for a, b in pairwise(pictures):
        assert (a != b).any(axis=2).mean() > 0.01
    gaps = np.diff(cursors)
    assert gaps.min() > 10
    assert gaps == pytest.approx(np.full(len(gaps), gaps.mean()), abs=0.1)  # evenly saved


def test_the_slider_stands_under_the_cursor(show, single):
    view = show(single)
    for at in (0, 2, 4):
        slide(view, at)
        box = view.locator("input[type=range]").bounding_box()
        thumb = box["x"] + 8 + (box["width"] - 16) * at / 4
        cursor = view.locator("line.cursor").first.bounding_box()
        assert cursor["x"] + cursor["width"] / 2 == pytest.approx(thumb, abs=2)


def test_pointing_into_a_curve_goes_to_the_nearest_checkpoint(show, single, attention):
    view = show(single)
    svg = view.locator(".chart svg").first
    slide(view, 0)
    start = svg.locator("line.cursor").bounding_box()["x"]
    slide(view, 4)
    end = svg.locator("line.cursor").bounding_box()["x"]
    top = svg.bounding_box()["y"]
    view.mouse.click(start + 0.45 * (end - start), top + 40)
    assert step_shown(view) == attention.steps[2]


def test_layers_heads_examples_and_the_ranking_can_be_picked(show, single, attention):
    view = show(single)
    seen = [pixels(view)]
    for name in ("layer", "head", "example"):
        select = pick(view, name)
        now = select.input_value()
        other = next(v for v in select.locator("option").evaluate_all("(o) => o.map((x) => x.value)") if v != now)
        select.select_option(other)
        settle(view)
        seen.append(pixels(view))
        assert (seen[-1] != seen[-2]).any()
    names = pick(view, "head").locator("option").all_inner_texts()
    assert names[0].startswith("all 2 heads")
    for score in ("recall", "binding"):
        pick(view, "ranked by").select_option(score)
        texts = pick(view, "head").locator("option").all_inner_texts()
        values = [float(text.rsplit(" ", 1)[1]) for text in texts[1:]]
        assert values == sorted(values, reverse=True)
        assert all(f"· {score} " in text for text in texts[1:])


def test_channels_and_factors_of_a_state_space_model_can_be_picked(show, double, mamba):
    view = show(double)
    factors = pick(view, "factor", 1).locator("option").all_inner_texts()
    assert sorted(factors) == ["composed", "conv", "ssm"]
    pick(view, "factor", 1).select_option("ssm")
    settle(view)
    texts = view.locator(".run").nth(1).locator("select[aria-label=head] option").all_inner_texts()
    assert texts[0].startswith("all 32 channels: mean |Φ|")
    assert len(texts) == 13
    assert all(text.startswith("channel ") for text in texts[1:])
    before = pixels(view, 1)
    view.locator(".run").nth(1).locator("select[aria-label=head]").select_option(index=3)
    settle(view)
    assert (pixels(view, 1) != before).any()
    assert "ssm channel" in view.locator(".run h3").nth(1).inner_text()


def hover(view, dest, src, size, number=0) -> str:
    """Points at an entry; what is said of it."""
    cover = view.locator(".cover").nth(number)
    cover.scroll_into_view_if_needed()
    box = cover.bounding_box()
    left, extent = matrix_box(view, number)
    cell = extent / size
    view.mouse.move(box["x"] + left + (src + 0.5) * cell, box["y"] + 2 + (dest + 0.5) * cell)
    return view.locator(".tip").nth(number).inner_text()


def matrix_box(view, number=0) -> tuple[float, float]:
    """Left side and extent of the square in the canvas, from the line above it."""
    (drawn,) = pixels(view, number)[1:2, :, 3].nonzero()[1:]
    return float(drawn.min() + 1), float(drawn.max() - drawn.min() - 1)


def test_hovering_tells_tokens_roles_and_the_value_of_the_model(show, double, attention, mamba):
    view = show(double)
    batch = attention.config.task.batch(0, split="test", size=16, seed=0)
    layout = batch.layout
    for number, run in enumerate((attention, mamba)):
        head = view.locator(".run").nth(number).locator("select[aria-label=head]")
        head.select_option(index=1)
        slide(view, 1, number)
        title = view.locator(".run h3").nth(number).inner_text()
        model = run.load(step_shown(view, number))
        if number == 0:
            layer, index = map(int, re.match(r"L(\d)H(\d)", title).groups())
            matrix = cs.phi(model, batch.tokens[:1], layer=layer)[0, index].detach()
        else:
            factor, index = re.match(r"L0 (\w+) channel (\d+)", title).groups()
            matrix = cs.phi(model, batch.tokens[:1], layer=0, factors=factor)[0, int(index)].detach()
        query, pair = layout.query_pos[0, 0].item(), layout.query_pair[0, 0].item()
        answer = layout.value_pos[0, pair].item()
        for dest, src in ((query, answer), (3, 2), (5, 0)):
            said = hover(view, dest, src, 16, number)
            reads, source = said.splitlines()[:2]
            assert reads.endswith(f"{batch.tokens[0, dest]} at {dest}")
            assert source.endswith(f"{batch.tokens[0, src]} at {src}")
            value = float(re.search(r"^(\S+) · ", said, re.MULTILINE)[1].replace("−", "-"))
            shown_within = 0.009 * matrix.abs().max().item() + 0.005 * abs(value)  # 8 bits, three digits
            assert value == pytest.approx(matrix[dest, src].item(), abs=shown_within)
        said = hover(view, query, answer, 16, number)
        assert said.startswith("query ")
        assert "← value " in said
        assert "recall: at a query, on the bound value" in said
        assert "answers " in said
        assert "binding: at a context value, on its key" in hover(view, 1, 0, 16, number)


def test_the_tip_goes_when_the_pointer_does(show, single):
    view = show(single)
    hover(view, 5, 2, 16)
    assert view.locator(".tip").is_visible()
    view.mouse.move(2, 2)
    assert not view.locator(".tip").is_visible()


def test_arrow_keys_move_through_checkpoints_and_heads(show, single, attention):
    view = show(single)
    last = len(attention.steps) - 1
    view.keyboard.press("ArrowLeft")
    assert step_shown(view) == attention.steps[last - 1]
    view.keyboard.press("Home")
    assert step_shown(view) == attention.steps[0]
    view.keyboard.press("ArrowLeft")
    assert step_shown(view) == attention.steps[0]
    view.keyboard.press("ArrowRight")
    assert step_shown(view) == attention.steps[1]
    before, head = pixels(view), pick(view, "head").input_value()
    view.keyboard.press("ArrowDown")
    settle(view)
    assert pick(view, "head").input_value() != head
    assert (pixels(view) != before).any()
    view.keyboard.press("ArrowUp")
    assert pick(view, "head").input_value() == head
    view.locator("input[type=range]").focus()
    view.keyboard.press("ArrowRight")
    assert step_shown(view) == attention.steps[2]
    view.keyboard.press("End")
    assert step_shown(view) == attention.steps[last]


def test_play_goes_through_the_checkpoints_and_stops_at_the_last(show, single, attention):
    view = show(single)
    view.evaluate(
        """() => {
          const name = document.querySelector("output.step");
          window.seen = [];
          new MutationObserver(() => window.seen.push(name.textContent)).observe(name, { childList: true });
        }"""
    )
    view.get_by_role("button", name="play").click()
    view.get_by_role("button", name="pause").wait_for()
    view.get_by_role("button", name="play").wait_for()
    assert view.evaluate("window.seen") == [f"step {step}" for step in attention.steps]
    view.keyboard.press("Home")
    view.get_by_role("button", name="play").blur()
    view.keyboard.press(" ")
    view.keyboard.press(" ")
    assert view.get_by_role("button", name="play").count() == 1
    assert step_shown(view) < attention.steps[-1]


def test_linked_sliders_move_together_and_can_be_let_go(show, double, attention, mamba):
    view = show(double)
    assert (attention.steps, mamba.steps) == ([0, 3, 6, 9, 12], [0, 4, 8])
    before = pixels(view, 1)
    for at, expected in ((0, 0), (1, 4), (2, 8), (4, 8)):
        slide(view, at)
        assert (step_shown(view, 0), step_shown(view, 1)) == (attention.steps[at], expected)
    slide(view, 0)
    assert (pixels(view, 1) != before).any()
    slide(view, 1, 1)
    assert step_shown(view, 0) == 3
    view.get_by_label("sliders").select_option("share")
    slide(view, 2, 1)
    assert step_shown(view, 0) == 12
    view.get_by_label("sliders").select_option("off")
    slide(view, 0, 1)
    assert (step_shown(view, 0), step_shown(view, 1)) == (12, 0)
    view.keyboard.press("ArrowRight")  # of the run touched last
    assert (step_shown(view, 0), step_shown(view, 1)) == (12, 4)


def test_two_runs_stand_side_by_side_in_a_wide_window_and_below_each_other_in_a_narrow_one(show, double):
    wide = [panel.bounding_box() for panel in show(double, width=1400).locator(".run").all()]
    assert wide[1]["x"] > wide[0]["x"] + wide[0]["width"]
    assert wide[1]["y"] == wide[0]["y"]
    narrow = [panel.bounding_box() for panel in show(double, width=700).locator(".run").all()]
    assert narrow[1]["y"] > narrow[0]["y"] + narrow[0]["height"]


@pytest.mark.parametrize("width", [320, 380, 760])
def test_a_narrow_window_does_not_scroll_sideways(show, double, width):
    view = show(double, width=width, height=800)
    for summary in view.locator("summary").all():
        summary.click()
    hover(view, 15, 12, 16)
    assert view.evaluate("document.documentElement.scrollWidth") <= width


def test_names_from_files_are_text(show, attention, tmp_path):
    copy = tmp_path / NASTY
    shutil.copytree(attention.path, copy, ignore=shutil.ignore_patterns("analysis"))
    (copy / "status.json").write_text(json.dumps({"state": "failed", "step": 3, "message": NASTY}))
    view = show(report(copy, sequences=16).save())
    assert view.locator("h2").inner_text() == NASTY
    assert NASTY in view.locator(".state").inner_text()
    assert NASTY in view.title()
    assert view.locator("img").count() == 0
    slide(view, 0)
    assert step_shown(view) == 0


def test_the_policy_of_the_page_stops_scripts_and_requests_that_are_not_its_own(browser, single, tmp_path):
    intrude = """(address) => {
      const script = document.createElement("script");
      script.textContent = "window.ran = true";
      const image = document.createElement("img");
      image.src = address;
      document.body.append(script, image);
      void fetch(address).catch(() => null);
    }"""
    unguarded = tmp_path / "unguarded.html"
    unguarded.write_text("<!doctype html><html data-ready><body>")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(2)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
        context = browser.new_context()
        view = context.new_page()
        view.goto(single.as_uri())
        view.wait_for_selector("html[data-ready]")
        view.evaluate(intrude, address)
        with pytest.raises(TimeoutError):
            server.accept()
        assert view.evaluate("window.ran === true") is False
        view.goto(unguarded.as_uri())  # where nothing forbids it, both happen
        view.evaluate(intrude, address)
        server.accept()[0].close()
        assert view.evaluate("window.ran === true") is True
        context.close()


def test_light_and_dark_are_both_there(show, single):
    light, dark = show(single), show(single, scheme="dark")
    backgrounds = [view.evaluate("getComputedStyle(document.body).backgroundColor") for view in (light, dark)]
    brightness = [sum(map(int, re.findall(r"\d+", text)[:3])) for text in backgrounds]
    assert brightness[0] > 600 > 150 > brightness[1]
    assert (pixels(light) != pixels(dark)).any(axis=2).mean() > 0.2
    before = pixels(light)
    light.emulate_media(color_scheme="dark")
    settle(light)
    assert (pixels(light) != before).any(axis=2).mean() > 0.2


def opened(path) -> tuple[dict, list[str]]:
    """The data of a report, and its matrices."""
    text = path.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    return data, re.findall(r'<script type="text/plain".*?</script>', text)


def test_the_bump_is_shaded_from_onset_to_end_and_chance_is_drawn(show, single, root):
    data, chunks = opened(single)
    run = data["runs"][0]
    run["bumps"] = [[3, 9]]
    times = {"onset": 3, "midpoint": 6, "end": 9, "low": 5, "high": None, "size": -1.5}
    run["events"] = [
        {"curve": "loss", "of": "loss", **times},
        {"curve": "recall L1H0", "of": "recall", **times, "size": 0.5},
    ]
    run["verdict"] = ["bump with accuracy", "loss falls around step 6"]
    (root / "bump.html").write_text(assembled(data, chunks), encoding="utf-8")
    view = show(root / "bump.html")
    assert view.locator(".verdict").inner_text() == "bump with accuracy — loss falls around step 6"
    x = []
    for at in (1, 3):
        slide(view, at)
        x.append(float(view.locator("line.cursor").first.get_attribute("x1")))
    shades = view.locator("rect.bump").all()
    assert len(shades) == 4  # loss, accuracy, scores, order of transitions
    for shade in shades:
        left, width = (float(shade.get_attribute(name)) for name in ("x", "width"))
        assert (left, left + width) == pytest.approx(tuple(x), abs=0.1)
    assert view.locator("line.event").count() == 2
    assert view.get_by_text("loss falls, 3 to 9").count() == 1
    assert view.get_by_text("any value of the context: 1/2").count() == 1
    chance = float(view.locator("line.level").get_attribute("y1"))
    ticks = {t.text_content(): t for t in view.locator(".chart").nth(1).locator("text.tick").all()}
    half = float(ticks["0.5"].get_attribute("y")) - 3.5
    assert chance == pytest.approx(half, abs=0.5)


def test_marks_ranges_and_shares_change_what_is_drawn(show, double):
    view = show(double)
    panel = view.locator(".run").nth(1)
    panel.locator("select[aria-label=head]").select_option(index=2)

    def drawn() -> np.ndarray:
        """All checkpoints: one of them has the largest entry, so its own range is that of all."""
        out = []
        for at in range(3):
            slide(view, at, 1)
            out.append(pixels(view, 1))
        return np.array(out)

    before = drawn()
    for change, where in (
        (lambda: panel.get_by_label("mark edges").select_option("none"), [0, 1, 2]),
        (lambda: panel.get_by_label("range").select_option("one"), None),
        (lambda: panel.get_by_label("contrast").select_option("1"), [0, 1, 2]),
        (lambda: panel.get_by_label("show").select_option("share"), [0, 1, 2]),
    ):
        change()
        after = drawn()
        changed = (after != before).any(axis=(1, 2, 3)).nonzero()[0].tolist()
        assert changed == where if where else len(changed) == 2
        before = after
    assert "share of its row" in panel.locator(".legend").inner_text()


def test_a_run_without_matrices_opens(browser, tmp_path):
    run = train(tiny(mixers="lstm", steps=6), root=tmp_path, name="lstm")
    context = browser.new_context()
    view = context.new_page()
    errors = []
    view.on("pageerror", lambda e: errors.append(e))
    view.goto(report(run, sequences=16).save().as_uri())
    view.wait_for_selector("html[data-ready]")
    slide(view, 0)
    view.keyboard.press("ArrowDown")
    view.keyboard.press("ArrowRight")
    assert step_shown(view) == 3
    assert "no mixing matrix" in view.locator(".matrix").inner_text()
    assert not errors
    context.close()


def test_a_notebook_shows_the_report_in_a_frame(browser, single, attention):
    shown = report(attention, sequences=16)._repr_html_()
    context = browser.new_context(offline=True)
    view = context.new_page()
    errors = []
    view.on("pageerror", lambda e: errors.append(e))
    view.set_content(f"<!doctype html><body>{shown}</body>")
    frame = view.frame_locator("iframe")
    frame.locator("h3").filter(has_text="at step 12").wait_for()
    frame.locator("input[type=range]").fill("0")
    frame.locator("h3").filter(has_text="at step 0").wait_for()
    assert not errors
    context.close()


# Several runs together. One page serves all of these tests: six runs, of which the first and the last are real.

NAMES = ["attention", "copy 0", "copy 1", "copy 2", "copy 3", "mamba"]
BESIDE = ["h2", ".heading", ".verdict", ".circuit", ".slider", ".events", ".pickers:not(.small)", "h3", ".heatmap"]
BESIDE += [f".chart.{name} {part}" for name in ("loss", "accuracy", "scores") for part in ("figcaption", "svg")]
BESIDE += [
    ".legend",
    ".pickers.small",
    *(f'[data-name="{name}"]' for name in ("circuit", "decay", "Config of the run")),
]
CHARTS = [
    {"kind": "AtSteps", "title": "m(δ)", "x": "lag δ", "at": [0, 1, 2], "step": [0, 12], "log": True,
     "values": [[1, 0.1, None], [1, 0.5, 0.2]]},
    {"kind": "OverSteps", "title": "Rate κ", "levels": [["chance", 0.5]],
     "lines": [{"name": "L0", "step": [0, 12], "value": [0.1, 0.3], "low": [0, 0.2], "high": [0.2, 0.4]}]},
    {"kind": "Bars", "title": "ablation: accuracy lost", "rest": "and 3 weaker ones",
     "bars": [["L0H0", 0.5, 0.01], ["L1", -0.1, None], [NASTY, None, None]]},
]  # fmt: skip


@pytest.fixture(scope="module")
def six(browser, double, root):
    """A page of six runs that differ in the length of everything that is said of them."""
    data, chunks = opened(double)
    one, other = data["runs"]
    chunks_of = [[c for c in chunks if f'id="matrices-{n}-' in c] for n in (0, 1)]
    middle = [{**one, "name": f"copy {i}", "bumps": [[3 * i, 3 * i + 2]]} for i in range(4)]
    data["runs"] = [{**one, "circuit": ["short"]}, *middle, {**other, "circuit": ["a long sentence, " * 40] * 2}]
    about = {"name": "decay", "about": "Decay.", "said": ["said"], "charts": CHARTS}
    data["runs"][0]["analyses"] = [*one["analyses"], about]
    data["runs"][1]["analyses"] = [*one["analyses"], {**about, "charts": []}]
    data["differs"] = [[f"seed {i}", "lr 0.1"] for i in range(5)] + [[f"field_{i} {i}" for i in range(9)]]
    column = {"name": "accuracy", "about": "", "cells": [[f"{v}%", v] for v in (9, 10, 2, 30, 4)] + [["–", None]]}
    verdict = {"name": "verdict", "about": "", "cells": [[name, None] for name in "caebfd"]}
    data["table"] = [column, verdict]
    renumbered = [
        chunk.replace('id="matrices-1-' if i == 5 else 'id="matrices-0-', f'id="matrices-{i}-')
        for i in range(6)
        for chunk in chunks_of[i == 5]
    ]
    (root / "six.html").write_text(assembled(data, renumbered), encoding="utf-8")
    started = shower(browser)
    yield next(started)(root / "six.html", width=1600)
    assert list(started) == []  # runs the checks at the end


def choose(view, *numbers):
    """Chooses the runs that are side by side."""
    for i in [*numbers, *({*range(6)} - {*numbers})]:
        view.get_by_label(f"show {NAMES[i]}").set_checked(i in numbers)
    settle(view)


def names_shown(view) -> list[str]:
    return view.locator(".run h2").evaluate_all("(all) => all.map((h2) => h2.childNodes[1].textContent)")


def test_of_six_runs_two_are_shown_first_and_others_can_be_chosen(six):
    choose(six, 0, 1)
    six.reload()  # as it opens
    six.wait_for_selector("html[data-ready]")
    assert six.locator(".run").count() == 2
    choose(six, 1, 3, 5)
    assert names_shown(six) == ["copy 0", "copy 2", "mamba"]
    boxes = [panel.bounding_box() for panel in six.locator(".run").all()]
    assert min(box["width"] for box in boxes) >= 400
    assert len({box["y"] for box in boxes}) == 1
    slide(six, 0, 2)
    assert [step_shown(six, i) for i in range(3)] == [0, 0, 0]
    choose(six, 4)
    assert (six.locator(".run").count(), step_shown(six)) == (1, 0)  # it goes where the others were
    six.get_by_label(f"show {NAMES[4]}").click()
    assert six.locator(".run").count() == 1  # one stays


def test_rows_of_runs_side_by_side_stand_at_the_same_height(six):
    choose(six, 0, 5)
    runs = [six.locator(".run").nth(i) for i in range(2)]
    tall = [run.locator(".circuit li").first.bounding_box()["height"] for run in runs]
    assert tall[1] > 3 * tall[0]
    for part in BESIDE:
        if all(run.locator(part).count() for run in runs):
            tops = [run.locator(part).first.bounding_box()["y"] for run in runs]
            assert tops[0] == pytest.approx(tops[1], abs=0.5), part
    assert six.evaluate("document.documentElement.scrollWidth") <= 1600


def test_the_heading_of_a_run_says_what_distinguishes_it(six):
    choose(six, 2, 5)
    first, last = six.locator(".run h2 .differs").all_inner_texts()
    assert first == "seed 2 · lr 0.1"
    assert last == "field 0 0 · field 1 1 · field 2 2 · 6 more"


def test_the_table_of_runs_sorts_by_any_column_and_back(six):
    def order(name) -> list[str]:
        six.locator(".runs-table").get_by_role("button", name=name).click()
        return six.locator(".runs-table tbody th").all_inner_texts()

    numbers = ["copy 1", "copy 3", "attention", "copy 0", "copy 2", "mamba"]
    assert order("accuracy") == numbers  # 2, 4, 9, 10, 30, and then what has no number
    assert order("accuracy") == [*reversed(numbers[:-1]), "mamba"]
    assert order("verdict") == ["copy 0", "copy 2", "attention", "mamba", "copy 1", "copy 3"]


def test_the_overlay_has_a_colour_for_each_run_and_its_bump_and_a_log_axis(six):
    choose(six, 0, 1)
    for chart in six.locator(".overlay svg").all():
        inks = chart.locator("path.line").evaluate_all("(lines) => lines.map((line) => getComputedStyle(line).stroke)")
        assert len(set(inks)) == 6
        shades = chart.locator("rect.bump").evaluate_all("(all) => all.map((one) => getComputedStyle(one).fill)")
        assert shades == inks[1:5]
    marks = six.locator(".runs-table .mark").evaluate_all("(m) => m.map((x) => getComputedStyle(x).backgroundColor)")
    assert sorted(marks) == sorted(inks)
    names = six.locator(".overlay .chart").first.locator(".name").all_inner_texts()
    assert [name.split("\n")[0] for name in names] == NAMES
    slide(six, 1)
    linear, log = [], []
    for scale, found in (("linear", linear), ("log", log)):
        six.get_by_label("steps", exact=True).select_option(scale)
        settle(six)
        found += [float(six.locator(".overlay line.cursor").first.get_attribute("x1"))]
        found += [float(r.get_attribute("x")) for r in six.locator(".overlay svg").first.locator("rect.bump").all()]
    left, right = 46, six.locator(".overlay svg").first.bounding_box()["width"] - 14
    for steps, places, place in (([3, 0, 3, 6, 9], linear, float), ([3, 0, 3, 6, 9], log, np.log1p)):
        expected = [left + (right - left) * place(step) / place(12) for step in steps]
        assert places == pytest.approx(expected, abs=0.2)
    six.locator(".overlay svg").first.scroll_into_view_if_needed()
    box = six.locator(".overlay svg").first.bounding_box()
    six.mouse.click(box["x"] + left + (right - left) * np.log1p(9) / np.log1p(12), box["y"] + 40)
    assert [step_shown(six, i) for i in range(2)] == [9, 9]
    six.get_by_label("steps", exact=True).select_option("linear")


def test_analyses_open_side_by_side_and_draw_their_charts_for_the_checkpoint_that_is_shown(six):
    choose(six, 0, 1)
    slide(six, 4)
    six.locator('[data-name="decay"] summary').nth(1).click()
    part = six.locator('[data-name="decay"]').first
    part.locator("figure").first.wait_for()
    assert [p.get_attribute("open") is not None for p in six.locator('[data-name="decay"]').all()] == [True, True]
    lag, rate, bars = part.locator("figure").all()
    strong = lag.locator("path.line:not(.thin)")
    late = strong.get_attribute("d")
    assert late.count("L") == 2
    assert "step 12" in lag.locator("b").inner_text()
    assert rate.locator("b").inner_text() == "0.3"
    slide(six, 0)
    assert strong.get_attribute("d").count("L") == 1  # the third number is not there
    assert "step 0" in lag.locator("b").inner_text()
    assert rate.locator("b").inner_text() == "0.1"
    assert bars.locator("b").all_inner_texts() == ["0.5 ± 0.01", "−0.1", "–"]
    widths = [box.bounding_box()["width"] for box in bars.locator(".fill").all()]
    assert widths[0] == pytest.approx(5 * widths[1], rel=0.02)
    assert bars.locator(".bar-name").nth(2).inner_text() == NASTY
    six.locator('[data-name="decay"] summary').first.click()


def test_six_runs_fit_a_phone(six):
    choose(six, 0, 5)
    six.set_viewport_size({"width": 420, "height": 800})
    settle(six)
    assert six.evaluate("document.documentElement.scrollWidth") <= 420
    six.set_viewport_size({"width": 1600, "height": 900})
    settle(six)


@pytest.mark.slow
def test_forty_checkpoints_of_128_channels_are_small_open_fast_and_follow_the_slider(show, tmp_path):
    """Worst case for the size: fresh weights whose Φ compresses badly. Times are of the browser's own clock."""
    config = cs.RunConfig.build(
        "mamba", "mqar", n_layers=1, d_model=64, length=64, pairs=4, vocab_size=256, batch_size=2, steps=39, lr=0.01,
        eval_every=13, eval_batches=2, eval_batch_size=2, log_every=13, save_every=1, threads=1, device="cpu",
    )  # fmt: skip
    run = train(config, root=tmp_path, name="mamba")
    assert len(run.steps) == 40
    torch.manual_seed(0)
    path = report(run, sequences=4).save()
    assert path.stat().st_size <= 25e6
    view = show(path)
    assert 0 < view.evaluate("performance.getEntriesByType('measure').find((m) => m.name === 'open').duration") < 2000
    times = view.evaluate(
        """async () => {
          const slider = document.querySelector("input[type=range]");
          const frame = () => new Promise((done) => requestAnimationFrame(done));
          const times = [];
          for (let at = 0; at < 40; at += 3) {
            await frame();
            const start = performance.now();
            slider.value = at;
            slider.dispatchEvent(new Event("input"));
            await frame();
            times.push(performance.now() - start);
          }
          return times;
        }"""
    )
    assert np.median(times) < 100
