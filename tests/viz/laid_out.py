"""Where the parts of a figure end up on the page."""

from matplotlib.transforms import Bbox

from circuitscope.viz.style import look


def the_legend(figure):
    """The only legend of the figure and of all its panels."""
    assert [a.get_legend() for a in figure.axes if a.get_legend() is not None] == []
    (legend,) = figure.legends
    return legend


def entries(figure) -> list[str]:
    """What the legend says."""
    return [text.get_text() for text in the_legend(figure).get_texts()]


def assert_legend_apart(figure) -> None:
    """The legend lies on the page and covers no panel, nor its labels."""
    with look():
        figure.draw_without_rendering()
        box = the_legend(figure).get_window_extent()
        page = figure.bbox
        assert page.x0 - 1 <= box.x0
        assert box.x1 <= page.x1 + 1
        assert page.y0 - 1 <= box.y0
        for axes in figure.axes:
            if axes.get_visible():
                both = Bbox.intersection(box, axes.get_tightbbox())
                assert both is None or both.height < 1, axes.get_ylabel()
