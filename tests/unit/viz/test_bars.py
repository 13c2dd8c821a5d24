"""Bars are drawn to scale, with one colour for parts of one name."""

from xml.etree import ElementTree

from girih.viz import svg
from girih.viz._figure import WIDTH
from girih.viz.bars import Bar, make_figure

BARS = [
    Bar("round 1", (("load", 1.0), ("run", 3.0)), "4 s"),
    Bar("round 2", (("load", 2.0), ("run", 0.0)), "2 s"),
]


def bars_of(figure):
    return [box for box in figure.boxes if ":" in box.note]


def test_widths_are_in_proportion_and_parts_follow_each_other():
    one, two, three, four = bars_of(make_figure("a title", "s", BARS))
    assert two.width == 3 * one.width
    assert three.width == 2 * one.width
    assert four.width == 0
    assert two.x == one.x + one.width
    assert one.x == three.x


def test_parts_of_one_name_have_one_colour_and_a_legend_names_them():
    figure = make_figure("a title", "s", BARS)
    load, run, again, _ = bars_of(figure)
    assert load.colour == again.colour != run.colour
    assert {label.text for label in figure.labels} >= {"a title", "load", "run", "round 1", "round 2", "4 s"}


def test_parts_that_are_all_alike_need_no_legend():
    figure = make_figure("a title", "s", [Bar("a", (("same", 1.0),), "1 s"), Bar("b", (("same", 2.0),), "2 s")])
    assert "same" not in {label.text for label in figure.labels}
    assert len(figure.boxes) == 2


def test_nothing_leaves_the_paper_and_the_picture_is_well_formed():
    many = tuple((f"a phase with a long name {i}", float(i)) for i in range(20))
    figure = make_figure("<&>", "s", [Bar("all", many, "190 s"), Bar("none", (("nothing", 0.0),), "0 s")])
    for box in figure.boxes:
        assert box.x >= 0
        assert box.x + box.width <= WIDTH
        assert box.y + box.height <= figure.height
    root = ElementTree.fromstring(svg.render(figure))
    assert root.find("{http://www.w3.org/2000/svg}title").text == "<&>"
