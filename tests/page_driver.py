"""Look at the live page as a person does, and into its canvas; for tests with a page of Playwright's."""

from __future__ import annotations

import contextlib
import re

from playwright.sync_api import expect
from server_process import poll


def tile(page, name):
    """The number in one of the tiles on top."""
    return page.locator(".tile", has=page.get_by_role("heading", name=name, exact=True)).locator(".value")


def num_pixels(page, *colour):
    """How many pixels of the map have a colour of its palette, such as "group", "used", 0."""
    return page.evaluate(
        """async (colour) => {
            const { palette } = await import("/dashboard/colors.js");
            const step = (value, name) => (typeof value === "function" ? value(name) : value[name]);
            const [red, green, blue] = colour.reduce(step, palette());
            const canvas = document.getElementById("canvas");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let found = 0;
            for (let i = 0; i < data.length; i += 4) {
                found += data[i] === red && data[i + 1] === green && data[i + 2] === blue;
            }
            return found;
        }""",
        list(colour),
    )


def places_in_use(page):
    """Where the slabs that requests hold lie on the screen now."""
    edges = page.evaluate(
        """async () => {
            const [{ readSnapshot, codeOf }, { layOut, cellOf }] = await Promise.all([
                import("/dashboard/snapshot.js"), import("/dashboard/layout.js")]);
            const { pools: [pool] } = readSnapshot(await (await fetch("/dashboard/state")).arrayBuffer());
            const frame = document.getElementById("map");
            const layout = layOut(pool.owners.length, frame.clientWidth, frame.clientHeight, 1, 0);
            const used = [...pool.owners.keys()].filter((slab) => [...pool.pages(slab)].some((v) => codeOf(v) > 1));
            return used.map((slab) => cellOf(layout, slab).map((edge) => edge + (layout.cell - layout.gap) / 4));
        }"""
    )
    corner = page.locator("#canvas").bounding_box()
    return [(corner["x"] + x, corner["y"] + y) for x, y in edges]


def point_at_pages(page, wanted):
    """Point at pages in use, one after the other, until the page says something of one; return what it says."""
    inspector = page.locator("#inspector")

    def find():
        for x, y in places_in_use(page)[:20]:
            page.mouse.move(x, y)
            with contextlib.suppress(AssertionError):  # its request may end just then
                expect(inspector).to_contain_text("tokens", timeout=2000)
            if re.search(wanted, text := inspector.inner_text()):
                return text
        return None

    return poll(find, what=f"some page says {wanted}")


def counts_in(page):
    """What the page counts in each group of the first pool."""
    return page.evaluate(
        """async () => {
            const { readSnapshot } = await import("/dashboard/snapshot.js");
            const { pools: [pool] } = readSnapshot(await (await fetch("/dashboard/state")).arrayBuffer());
            return [...pool.counts().values()];
        }"""
    )
