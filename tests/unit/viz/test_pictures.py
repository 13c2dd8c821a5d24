"""The picture shows the plan's numbers, in the terminal and as SVG."""

import io
import re
from xml.etree import ElementTree

import pytest
from planner_models import mixed
from rich.console import Console

from girih.kv import FullAttentionSpec, get_kv_cache_configs
from girih.units import GIB, MIB
from girih.viz import svg, terminal
from girih.viz._rows import layer_labels, plan_rows

NAMESPACE = "{http://www.w3.org/2000/svg}"


def plan(memory=GIB, layers=None, **options):
    return get_kv_cache_configs([layers or mixed(3, 15)], [memory], **{"max_model_len": 4096, **options})[0]


def drawn(config, width=100, **options):
    out = io.StringIO()
    terminal.draw(config, Console(file=out, width=width, **options))
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
    terminal.draw(plan(), Console(file=out, width=80))
    assert out.getvalue().isascii()
    assert "|" in out.getvalue()


@pytest.mark.parametrize("width", [10, 40, 80, 300])
def test_bars_of_one_picture_end_in_one_column(width):
    bars = [line for line in drawn(plan(), width).splitlines() if "│" in line]
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


def test_groups_of_one_page_size_share_a_slab_row_and_many_are_said_in_words():
    config = plan(2 * MIB, mixed(2, 18, window=32), max_model_len=160)
    assert len(config.groups) == 10
    rows = plan_rows(config)
    assert [row.label for row in rows[:3]] == ["pool", "slab, group 0-5", "page, group 0"]
    assert "and 4 more groups of the same kinds" in drawn(config)
    assert "and 4 more groups of the same kinds" in svg.draw(config, "x")


def test_layers_without_numbers_keep_their_names():
    assert layer_labels(["a.0.x", "a.1.x"]) == ["0", "1"]
    assert layer_labels(["a.0.x", "b.0.x"]) == ["a.0.x", "b.0.x"]
    assert layer_labels(["front", "back"]) == ["front", "back"]


def test_the_svg_draws_every_cell_in_proportion_with_its_note():
    config = plan()
    root = ElementTree.fromstring(svg.draw(config, "Gemma <3> & co"))
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
    assert totals == {svg.WIDTH - 2 * svg.MARGIN - svg.LABEL_WIDTH}


def test_layer_names_are_escaped():
    layers = {"<a>&.0": FullAttentionSpec(1, 64, "float32")}
    notes = [node.text for node in ElementTree.fromstring(svg.draw(plan(layers=layers), "x")).iter(f"{NAMESPACE}title")]
    assert any(note.startswith("<a>&.0: ") for note in notes)


def test_a_model_without_caches_has_a_picture_that_says_so():
    (config,) = get_kv_cache_configs([{}], [0], max_model_len=9)
    assert drawn(config).strip() == ""
    assert "this model has no KV cache" in svg.draw(config, "x")
