"""The picture shows the plan's numbers, in the terminal, as SVG and as PNG."""

import io
import re
import sys
import time
from xml.etree import ElementTree

import pytest
from PIL import Image
from planner_models import mixed
from rich.console import Console

from girih.errors import ConfigError
from girih.kv import FullAttentionSpec, SharedCacheSpec, SlidingWindowSpec, StateSpec, get_kv_cache_configs
from girih.units import GIB, MIB
from girih.viz import _figure, png, svg, terminal
from girih.viz._rows import Cell, layer_labels, picture_sections, plan_rows

NAMESPACE = "{http://www.w3.org/2000/svg}"


def plan(memory=GIB, layers=None, **options):
    return get_kv_cache_configs([layers or mixed(3, 15)], [memory], **{"max_model_len": 4096, **options})[0]


def plan_stages(*stages, memory=GIB, **options):
    return get_kv_cache_configs(stages, [memory] * len(stages), **{"max_model_len": 4096, **options})


def drawn(*plans, width=100, **options):
    out = io.StringIO()
    terminal.draw(plans, Console(file=out, width=width, **options))
    return out.getvalue()


@pytest.mark.parametrize("memory", [5 * MIB, 60 * MIB, GIB])
def test_rows_add_up_to_the_bytes_of_the_plan(memory):
    config = plan(memory, max_model_len=256)
    pool, *rows = plan_rows(config)
    assert sum(cell.num_bytes for cell in pool.cells) == config.total_bytes
    for row in rows:
        group = config.groups[row.cells[0].group]
        whole = config.slab_bytes if row.label.startswith("slab") else group.page_size_bytes
        assert sum(cell.num_bytes for cell in row.cells) == whole


def test_a_row_per_group_names_its_layers():
    lines = drawn(plan()).splitlines()
    assert any(
        line.startswith("  page, group 1") and re.findall(r"\d+", line)[1:] == ["5", "11", "17"] for line in lines
    )
    assert any("15 layers: 0-4, 6-10, 12-16; sliding window 512" in line for line in lines)
    assert sum("page" in line for line in lines if line.startswith("  slab, group 1")) == 1
    assert "free" in lines[0]


def test_without_a_terminal_there_is_no_escape_code():
    assert "\x1b" not in drawn(plan())
    assert "\x1b" in drawn(plan(), force_terminal=True, color_system="standard")


class AsciiFile(io.StringIO):
    encoding = "ascii"


def test_a_terminal_without_utf8_gets_ascii():
    out = AsciiFile()
    terminal.draw([plan()], Console(file=out, width=80))
    assert out.getvalue().isascii()
    assert "|" in out.getvalue()


@pytest.mark.parametrize("width", [10, 40, 80, 300])
def test_bars_of_one_picture_end_in_one_column(width):
    bars = [line for line in drawn(plan(), width=width).splitlines() if "│" in line]
    assert len({len(line) for line in bars}) == 1
    assert len(bars[0]) <= max(width, 40)


def test_widths_share_all_columns_out():
    for row in plan_rows(plan()):
        for columns in (20, 33, 100):
            widths = terminal.cell_widths(row.cells, columns)
            assert sum(widths) == columns
            assert min(widths) >= 0


def test_a_request_stays_visible_in_a_huge_pool():
    pool = plan_rows(plan(64 * GIB))[0]
    widths = terminal.cell_widths(pool.cells, 60)
    assert widths[:2] == [1, 1]
    assert widths[-1] == 1


def test_very_many_pages_are_drawn_at_once():
    cells = [Cell(16, "page", 0, "")] * 100_000
    start = time.process_time()
    assert terminal.cell_widths(cells, 100).count(1) == 100
    assert time.process_time() - start < 2  # looking through all of them for each takes minutes


def test_groups_of_one_page_size_share_a_slab_row_and_many_are_said_in_words():
    config = plan(2 * MIB, mixed(2, 18, window=32), max_model_len=160)
    assert len(config.groups) == 10
    rows = plan_rows(config)
    assert [row.label for row in rows[:3]] == ["pool", "slab, group 0-5", "page, group 0"]
    assert "and 4 more groups of the same kinds" in drawn(config)
    assert "and 4 more groups of the same kinds" in svg.draw([config], "x")


def test_layers_without_numbers_keep_their_names():
    assert layer_labels(["a.0.x", "a.1.x"]) == ["0", "1"]
    assert layer_labels(["a.0.x", "b.0.x"]) == ["a.0.x", "b.0.x"]
    assert layer_labels(["front", "back"]) == ["front", "back"]


def test_the_svg_draws_every_cell_in_proportion_with_its_note():
    config = plan()
    root = ElementTree.fromstring(svg.draw([config], "Gemma <3> & co"))
    assert root.find(f"{NAMESPACE}title").text == "Gemma <3> & co"
    cells = root.findall(f"{NAMESPACE}g")
    rows = plan_rows(config)
    assert len(cells) == sum(len(row.cells) for row in rows)
    notes = [cell.find(f"{NAMESPACE}title").text for cell in cells]
    assert notes == [cell.note for row in rows for cell in row.cells]
    for name in (name for group in config.groups for name in group.layer_names):
        assert any(note.startswith(f"{name}: ") for note in notes)
    tops = {}
    for cell in cells:
        rect = cell.find(f"{NAMESPACE}rect")
        tops.setdefault(rect.get("y"), []).append(float(rect.get("width")))
    assert len(tops) == len(rows)
    totals = {round(sum(widths)) for widths in tops.values()}
    assert totals == {_figure.WIDTH - 2 * _figure.MARGIN - _figure.LABEL_WIDTH}


def test_layer_names_are_escaped():
    layers = {"<a>&.0": FullAttentionSpec(1, 64, "float32")}
    notes = [
        node.text for node in ElementTree.fromstring(svg.draw([plan(layers=layers)], "x")).iter(f"{NAMESPACE}title")
    ]
    assert any(note.startswith("<a>&.0: ") for note in notes)


def test_a_model_without_caches_has_a_picture_that_says_so():
    (config,) = get_kv_cache_configs([{}], [0], max_model_len=9)
    assert drawn(config).strip() == ""
    assert "this model has no KV cache" in svg.draw([config], "x")


STATE = StateSpec(((3, 64), (4, 16, 16)), ("bfloat16", "float32"))


def test_a_page_of_a_state_group_is_one_state():
    layers = {
        f"model.layers.{i}.mixer": FullAttentionSpec(2, 64, "bfloat16") if i % 4 == 3 else STATE for i in range(8)
    }
    config = plan(layers=layers)
    text = drawn(config)
    assert "one state of 6 layers: 0-2, 4-6; recurrent state" in text
    assert "16 tokens of 2 layers: 3, 7; full attention" in text
    index = next(i for i, group in enumerate(config.groups) if group.retention.holds_state)
    notes = [cell.note for row in plan_rows(config) for cell in row.cells if cell.group == index]
    assert "page 0: one state" in notes


def test_a_layer_that_reads_another_s_cache_is_named_in_its_note():
    spec, window = FullAttentionSpec(1, 64, "bfloat16"), SlidingWindowSpec(1, 64, "bfloat16", 32)
    layers = {"a.0": window, "a.1": spec, "a.2": window, "a.3": SharedCacheSpec("a.1", spec)}
    layers |= {"a.4": SharedCacheSpec("a.2", window), "a.5": SharedCacheSpec("a.1", spec)}
    rows = {row.caption: row for row in plan_rows(plan(layers=layers)) if row.label.startswith("page")}
    full = rows["16 tokens of 1 layer: 1 (read by 2 more); full attention"]
    assert [cell.note for cell in full.cells] == ["a.1: 4.00 KiB, also read by a.3, a.5"]
    sliding = rows["16 tokens of 2 layers: 0, 2 (read by 1 more); sliding window 32"]
    assert [cell.note for cell in sliding.cells] == ["a.0: 4.00 KiB", "a.2: 4.00 KiB, also read by a.4"]


def test_each_kind_of_pool_has_a_section_and_groups_are_numbered_through():
    attention = {f"model.layers.{i}.self_attn": FullAttentionSpec(2, 64, "bfloat16") for i in range(4)}
    states = {f"model.layers.{i}.mixer": STATE for i in range(4, 8)}
    more = {f"model.layers.{i}.self_attn": FullAttentionSpec(2, 64, "bfloat16") for i in range(8, 12)}
    plans = plan_stages(attention, states, more, {})
    sections = picture_sections(plans)
    assert [section.heading for section in sections] == ["stage 0, and alike on stage 2", "stage 1"]
    assert [section.rows[-1].label for section in sections] == ["page, group 0", "page, group 1"]
    text = drawn(*plans)
    root = ElementTree.fromstring(svg.draw(plans, "x"))
    labels = [node.text for node in root.findall(f"{NAMESPACE}text")]
    for heading in ("stage 0, and alike on stage 2", "stage 1"):
        assert heading in text
        assert heading in labels
    colours = {rect.get("fill") for rect in root.iter(f"{NAMESPACE}rect")}
    assert {_figure.COLOURS[0], _figure.COLOURS[1]} <= colours


def test_stages_of_one_class_with_other_pages_have_sections_of_their_own():
    two, three = (
        {f"model.layers.{first + i}.self_attn": FullAttentionSpec(2, 64, "bfloat16") for i in range(count)}
        for first, count in ((0, 2), (2, 3))
    )
    plans = plan_stages(two, three)
    assert {plan.stage_class for plan in plans} == {0}
    assert [section.heading for section in picture_sections(plans)] == ["stage 0", "stage 1"]


def test_everything_in_the_svg_is_on_the_paper():
    plans = plan_stages({"a.0": FullAttentionSpec(2, 64, "bfloat16")}, {"a.1": STATE})
    root = ElementTree.fromstring(svg.draw(plans, "x"))
    height = float(root.get("height"))
    assert all(float(node.get("y")) < height for node in root.iter(f"{NAMESPACE}text"))
    bottoms = [
        float(node.get("y")) + float(node.get("height")) for node in root.iter(f"{NAMESPACE}rect") if node.get("y")
    ]
    assert max(bottoms) < height


def test_the_png_paints_the_same_boxes():
    config = plan()
    figure = _figure.make_figure([config], "x")
    image = Image.open(io.BytesIO(png.draw([config], "x")))
    assert image.format == "PNG"
    assert image.size == (_figure.WIDTH * png.SCALE, figure.height * png.SCALE)
    for box in figure.boxes:
        if box.width > 5:
            corner = ((box.x + 2) * png.SCALE, (box.y + 2) * png.SCALE)
            assert "#{:02x}{:02x}{:02x}".format(*image.getpixel(tuple(map(int, corner)))) == box.colour
    label = figure.labels[1]
    area = (
        int(label.x) * png.SCALE,
        int(label.y - 10) * png.SCALE,
        int(label.x + 30) * png.SCALE,
        int(label.y) * png.SCALE,
    )
    assert image.crop(area).getextrema() == ((0, 255),) * 3  # black on white: a text


def test_a_png_without_pillow_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"pip install pillow; or give the file a name in .svg"):
        png.draw([plan()], "x")
