// Where slabs and their pages lie on the map. All lengths are in the screen's own pixels.

const LEAST = 4; // CSS pixels of a cell: smaller ones cannot be told apart, so that several slabs share one
const MOST = 56;
const FLATTEST = 6; // pages side by side, before they go into several rows

/** Lay slabs out row by row: as large as all fit into width x height, or into 4 ** zoom times as much by scrolling. */
export function layOut(numSlabs, width, height, pixelRatio, zoom) {
  const least = Math.ceil(LEAST * pixelRatio);
  const room = height * 4 ** zoom;
  const fits = (cell) => Math.floor(width / cell) * Math.floor(room / cell);
  const slabsPerCell = Math.max(1, Math.ceil(numSlabs / Math.max(1, fits(least))));
  const numCells = Math.max(1, Math.ceil(numSlabs / slabsPerCell));
  let cell = Math.min(Math.floor(MOST * pixelRatio), Math.floor(Math.sqrt((width * room) / numCells)));
  while (cell > least && fits(cell) < numCells) cell -= 1;
  cell = Math.max(cell, least);
  const columns = Math.max(1, Math.floor(width / cell));
  const rows = Math.ceil(numCells / columns);
  const gap = Math.round(cell >= 14 * pixelRatio ? 2 * pixelRatio : pixelRatio);
  return { numSlabs, cell, gap, columns, rows, slabsPerCell, height: rows * cell };
}

/** How the pages of a slab lie in its cell: {columns, rows}, or null where they are too small to be told apart. */
export function pageGrid(layout, perSlab) {
  const side = layout.cell - layout.gap;
  let columns = perSlab;
  if (perSlab > FLATTEST) {
    columns = Math.ceil(Math.sqrt(perSlab));
    for (let wider = columns; wider * wider <= FLATTEST * perSlab; wider += 1) {
      if (perSlab % wider === 0) {
        columns = wider;
        break;
      }
    }
  }
  const rows = Math.ceil(perSlab / columns);
  return layout.slabsPerCell === 1 && side >= 3 * Math.max(columns, rows) ? { columns, rows } : null;
}

/** The place of a page within its cell: [left, top, right, bottom]. */
export function pageBox(layout, grid, index) {
  const side = layout.cell - layout.gap;
  const at = (i, parts) => Math.round((i * side) / parts);
  const column = index % grid.columns;
  const row = Math.floor(index / grid.columns);
  const line = side >= 10 * Math.max(grid.columns, grid.rows) ? 1 : 0; // between pages
  const right = at(column + 1, grid.columns) - (column < grid.columns - 1 ? line : 0);
  const bottom = at(row + 1, grid.rows) - (row < grid.rows - 1 ? line : 0);
  return [at(column, grid.columns), at(row, grid.rows), right, bottom];
}

/** What is at a point of the map: {slab, page}, the page null where none is told apart; null beside all slabs. */
export function hit(layout, perSlabOf, x, y) {
  const column = Math.floor(x / layout.cell);
  const row = Math.floor(y / layout.cell);
  const slab = (row * layout.columns + column) * layout.slabsPerCell;
  if (column < 0 || column >= layout.columns || slab < 0 || slab >= layout.numSlabs) return null;
  const perSlab = perSlabOf(slab);
  const grid = perSlab ? pageGrid(layout, perSlab) : null;
  if (grid === null) return { slab, page: null };
  const side = layout.cell - layout.gap;
  const part = (offset, parts) => Math.min(parts - 1, Math.floor((Math.min(offset, side - 1) * parts) / side));
  const page = part(y % layout.cell, grid.rows) * grid.columns + part(x % layout.cell, grid.columns);
  return { slab, page: Math.min(page, perSlab - 1) };
}

/** The left and upper edge of a slab's cell. */
export function cellOf(layout, slab) {
  const index = Math.floor(slab / layout.slabsPerCell);
  return [(index % layout.columns) * layout.cell, Math.floor(index / layout.columns) * layout.cell];
}
