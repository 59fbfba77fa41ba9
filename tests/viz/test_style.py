"""What all figures share: endings, embedded fonts, repeatable bytes, the data behind, no window."""

import subprocess
import sys

import matplotlib
import pandas as pd
import pytest

from circuitscope.errors import UserError
from circuitscope.viz.style import COLOURS, ENDINGS, Sheet, look, pens, save, written


def sheet() -> Sheet:
    with look():
        figure = Sheet(table=lambda: pd.DataFrame({"step": [0, 1], "value": [0.5, 1 / 3]}), figsize=(2, 2))
        figure.subplots().plot([0, 1], [0.5, 1 / 3], label="Φ, κ and δ")
        figure.axes[0].set_title("Φ, κ and δ")
    return figure


@pytest.mark.parametrize(
    ("ending", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_a_figure_is_written_where_asked_and_folders_are_made(tmp_path, ending, magic):
    (path,) = save(sheet(), tmp_path / "new" / f"figure{ending}")
    assert path == tmp_path / "new" / f"figure{ending}"
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize("name", ["figure.jpg", "figure", "figure.", "png"])
def test_another_ending_names_those_that_work(tmp_path, name):
    with pytest.raises(UserError) as error:
        save(sheet(), tmp_path / name)
    assert all(ending in str(error.value) for ending in ENDINGS)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        save(sheet(), tmp_path / "file" / "figure.png")


def test_fonts_are_in_the_file(tmp_path):
    pdf, svg = (save(sheet(), tmp_path / name)[0] for name in ("a.pdf", "a.svg"))
    assert b"/FontFile2" in pdf.read_bytes()  # an embedded TrueType font
    assert b"/Type3" not in pdf.read_bytes()
    assert "<text" not in svg.read_text()  # outlines, which need no font


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_same_figure_has_the_same_bytes(tmp_path, ending):
    one, other = (save(sheet(), tmp_path / f"{n}{ending}")[0] for n in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_the_data_behind_lies_beside_it(tmp_path):
    _, table = save(sheet(), tmp_path / "a.png", data=True)
    assert table == tmp_path / "a.csv"
    read = pd.read_csv(table)
    assert list(read) == ["step", "value"]
    assert read.value.tolist() == pytest.approx([0.5, 1 / 3], rel=1e-6)


def test_a_notebook_shows_a_figure_without_a_window():
    assert sheet()._repr_png_().startswith(b"\x89PNG")


@pytest.mark.slow
def test_drawing_and_saving_need_no_pyplot(tmp_path):
    script = (
        "import sys\n"
        "from circuitscope.viz.heatmap import heatmap\n"
        "from circuitscope.viz.style import save\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        f"save(heatmap(np.eye(4)), Path({str(tmp_path / 'a.png')!r}))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_callers_settings_come_back():
    before = dict(matplotlib.rcParams)
    with look():
        assert matplotlib.rcParams["pdf.fonttype"] == 42 != before["pdf.fonttype"]
    assert dict(matplotlib.rcParams) == before


def test_every_run_has_a_colour_of_its_own_and_beyond_them_another_line_style():
    assert len(set(COLOURS)) == len(COLOURS) >= 6
    assert [style for _, style in pens(len(COLOURS))] == ["-"] * len(COLOURS)
    assert len(set(pens(28))) == 28


def test_names_are_written_letter_by_letter(tmp_path):
    with look():
        figure = Sheet(table=pd.DataFrame, figsize=(2, 2))
        axes = figure.subplots()
        for name in ("_hidden", "a$x_1^{$"):
            axes.plot([0, 1], label=written(name))
        texts = [t.get_text() for t in axes.legend().get_texts()]
    assert [t.strip().replace(r"\$", "$") for t in texts] == ["_hidden", "a$x_1^{$"]
    save(figure, tmp_path / "a.png")
