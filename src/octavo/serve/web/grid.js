/** Where the cells of a pool lie on a canvas, and how one is drawn. */

const LARGEST = 24;
const SMALLEST = 3;

/** How to lay `blocks` cells into a width and a height: `per` blocks share a cell when there are
 * more than can be seen. */
export function layout(blocks, width, height) {
  for (let pitch = LARGEST; pitch >= SMALLEST; pitch -= 1) {
    const columns = Math.max(1, Math.floor(width / pitch));
    if (Math.ceil(blocks / columns) * pitch <= height) return grid(blocks, 1, columns, pitch);
  }
  const columns = Math.max(1, Math.floor(width / SMALLEST));
  const most = columns * Math.max(1, Math.floor(height / SMALLEST));
  return grid(Math.ceil(blocks / Math.ceil(blocks / most)), Math.ceil(blocks / most), columns, SMALLEST);
}

function grid(cells, per, columns, pitch) {
  const gap = pitch >= 12 ? 2 : pitch >= 5 ? 1 : 0;
  const rows = Math.ceil(cells / columns);
  return { cells, per, columns, rows, pitch, size: pitch - gap, height: rows * pitch };
}

/** The cell at a point, or -1. */
export function cellAt(grid, x, y) {
  const column = Math.floor(x / grid.pitch);
  const cell = Math.floor(y / grid.pitch) * grid.columns + column;
  return column >= 0 && column < grid.columns && cell >= 0 && cell < grid.cells ? cell : -1;
}

/** The upper left corner of a cell. */
export const placeOf = (grid, cell) => [
  (cell % grid.columns) * grid.pitch,
  Math.floor(cell / grid.columns) * grid.pitch,
];

/** Draw one cell. `look` has `fill`, and may have `second` (another owner), `level` (how full it is,
 * of 1), `dim`, `pinned` and `moving`. */
export function drawCell(context, grid, cell, look, colours) {
  const [x, y] = placeOf(grid, cell);
  const { size, pitch } = grid;
  context.clearRect(x, y, pitch, pitch);
  context.globalAlpha = look.dim ? 0.22 : 1;
  context.fillStyle = look.fill;
  if (look.level !== undefined && size >= 6) {
    const full = Math.max(1, Math.round(size * look.level));
    context.globalAlpha *= 0.35;
    context.fillRect(x, y, size, size - full);
    context.globalAlpha = look.dim ? 0.22 : 1;
    context.fillRect(x, y + size - full, size, full);
  } else {
    context.fillRect(x, y, size, size);
  }
  if (look.second && size >= 5) {
    context.fillStyle = look.second;
    triangle(context, x, y, size);
  }
  if (look.pinned && size >= 5) {
    context.fillStyle = colours.mark;
    const dot = Math.max(2, Math.round(size / 3));
    context.fillRect(x + size - dot, y, dot, dot);
  }
  if (look.moving && size >= 5) {
    context.strokeStyle = colours.paper;
    context.lineWidth = Math.max(1, size / 7);
    context.beginPath();
    context.moveTo(x + 1, y + size - 1);
    context.lineTo(x + size - 1, y + 1);
    context.stroke();
  }
  context.globalAlpha = 1;
}

function triangle(context, x, y, size) {
  context.beginPath();
  context.moveTo(x + size, y);
  context.lineTo(x + size, y + size);
  context.lineTo(x, y + size);
  context.fill();
}

/** The mean of colours, each with how often it is there. */
export function mixed(parts) {
  let red = 0, green = 0, blue = 0, all = 0;
  for (const [[r, g, b], times] of parts) {
    red += r * times;
    green += g * times;
    blue += b * times;
    all += times;
  }
  return `rgb(${Math.round(red / all)} ${Math.round(green / all)} ${Math.round(blue / all)})`;
}

/** A colour as [red, green, blue]. */
export function rgb(context, colour) {
  context.fillStyle = colour;
  const text = context.fillStyle;
  return [1, 3, 5].map((start) => parseInt(text.slice(start, start + 2), 16));
}
