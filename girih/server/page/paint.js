// Draws the slabs that are in sight into the pixels of an image.

import { CACHED, codeOf, NOBODY, NOTHING, requestIndex } from "./snapshot.js";
import { mix } from "./colors.js";
import { pageBox, pageGrid } from "./layout.js";

const opaque = ([red, green, blue]) => (255 << 24) | (blue << 16) | (green << 8) | red;

/** group -> colour of each code, as pixels. `mode` is "group" or "request"; `lit` the code of a request to point out. */
export function coloursOfCodes(colours, groups, requests, mode, lit) {
  return new Map(
    [...groups].map((group) => {
      const own = (i) => {
        if (i === NOTHING) return mode === "group" ? colours.group.free(group) : colours.request.free;
        if (i === CACHED) return mode === "group" ? colours.group.cached(group) : colours.request.cached;
        if (mode === "group") return colours.group.used(group);
        const request = requests[requestIndex(i)];
        return request ? colours.request.used(Number(request.id)) : colours.request.other;
      };
      const dim = (colour, i) => (lit !== null && i !== lit && i > CACHED ? mix(colour, colours.ground, 0.2) : colour);
      const codes = Array.from({ length: requests.length - requestIndex(0) }, (_, i) => opaque(dim(own(i), i)));
      return [group, Int32Array.from(codes)];
    }),
  );
}

/** Paint a pool. `pixels` is Int32Array [height, width]; `top` the first row of the map that is in sight. */
export function paint(pixels, width, top, pool, layout, colours, ground) {
  pixels.fill(0);
  const { cell, gap, columns, slabsPerCell, numSlabs } = layout;
  const side = cell - gap;
  const height = pixels.length / width;
  const nobody = opaque(ground);
  const grids = new Map([...pool.groups].map(([group, { perSlab }]) => [group, gridOf(layout, perSlab)]));

  const box = (left, above, right, below, colour) => {
    for (let y = Math.max(0, above); y < Math.min(height, below); y += 1) {
      pixels.fill(colour, y * width + left, y * width + right);
    }
  };

  const lastRow = Math.min(layout.rows, Math.ceil((top + height) / cell));
  for (let row = Math.floor(top / cell); row < lastRow; row += 1) {
    const above = row * cell - top;
    for (let column = 0; column < columns; column += 1) {
      const slab = (row * columns + column) * slabsPerCell;
      if (slab >= numSlabs) break;
      const left = column * cell;
      const group = pool.owners[slab];
      const boxes = slabsPerCell === 1 && group !== NOBODY ? grids.get(group) : null;
      if (boxes === null) {
        const last = Math.min(numSlabs, slab + slabsPerCell);
        box(left, above, left + side, above + side, average(pool, slab, last, colours, nobody));
        continue;
      }
      const values = pool.pages(slab);
      const lut = colours.get(group);
      for (let page = 0; page < values.length; page += 1) {
        const [x0, y0, x1, y1] = boxes[page];
        box(left + x0, above + y0, left + x1, above + y1, lut[codeOf(values[page])]);
      }
    }
  }
}

function gridOf(layout, perSlab) {
  const grid = pageGrid(layout, perSlab);
  return grid && Array.from({ length: perSlab }, (_, page) => pageBox(layout, grid, page));
}

/** The mean colour of the pages of some slabs; every slab counts the same. */
function average(pool, first, end, colours, nobody) {
  let red = 0;
  let green = 0;
  let blue = 0;
  for (let slab = first; slab < end; slab += 1) {
    const group = pool.owners[slab];
    if (group === NOBODY) {
      red += nobody & 255;
      green += (nobody >> 8) & 255;
      blue += (nobody >> 16) & 255;
      continue;
    }
    const { codes, perSlab } = pool.groups.get(group);
    const lut = colours.get(group);
    const start = pool.starts[slab];
    for (let i = start; i < start + perSlab; i += 1) {
      const colour = lut[codeOf(codes[i])];
      red += (colour & 255) / perSlab;
      green += ((colour >> 8) & 255) / perSlab;
      blue += ((colour >> 16) & 255) / perSlab;
    }
  }
  const number = end - first;
  return opaque([Math.round(red / number), Math.round(green / number), Math.round(blue / number)]);
}
