// Lanes over time on a canvas. Where spans are wide enough each is a box; where many share a pixel, the pixel shows their
// shares stacked, so that the overview is a chart of how the time was spent and not of whichever span was drawn last.

const GUTTER = 128;
const AXIS = 20;
const ROWS = { gpu: 24, cpu: 18, loader: 10, writer: 10, between: 8 };
const LOW_ROWS = { gpu: 17, cpu: 12, loader: 8, writer: 8, between: 5 }; // for eight GPUs on one screen
const MANY_WORKERS = 6;
const MIN_VIEW = 20; // microseconds
const SPARSE_PIXELS = 5; // pixels a span has on average, from which spans are drawn as boxes
const SHARED_SPANS = 12; // spans that a column of shares is made of where it can be, so that cycles do not beat with pixels
const WIDEST_SHARE = 16; // pixels

class LaneView {
  constructor(model) {
    this.model = model;
    this.showThreads = false;
    this.follow = 0; // microseconds of the newest end that a live page keeps in view; 0: the view stays where it is
    this.picked = null;
    this.map = element("canvas", { class: "map", "aria-hidden": "true" });
    this.canvas = element("canvas", {
      class: "main", tabindex: "0", role: "application",
      "aria-label": "Lanes over time. Arrow keys move, plus and minus zoom, 0 shows the whole run, Escape lets a pack go.",
    });
    this.tooltip = element("div", { class: "tooltip", hidden: true });
    this.status = element("div", { class: "picked", "aria-live": "polite" });
    this.legend = element("div", { class: "legend" });
    this.stage = element("div", { class: "stage" }, this.map, this.canvas, this.tooltip);
    this.view = [0, 1];
    this.dirty = false;
    new ResizeObserver(() => this.redraw()).observe(this.stage);
    darkScheme.addEventListener("change", () => this.redraw());
    this.dataChanged(true);
  }

  get extent() { return Math.max(1000, (this.model.end - this.model.begin) * 1e6); }
  get rows() { return this.model.lanes.filter((lane) => this.showThreads || !["loader", "writer"].includes(lane.lane)); }
  get plotWidth() { return Math.max(50, this.stage.clientWidth - GUTTER); }
  x(time) { return GUTTER + ((time - this.view[0]) / (this.view[1] - this.view[0])) * this.plotWidth; }
  timeAt(x) { return this.view[0] + ((x - GUTTER) / this.plotWidth) * (this.view[1] - this.view[0]); }

  dataChanged(whole) {
    this.mapShares = null;
    if (whole) this.view = [0, this.extent];
    if (this.follow) this.view = [Math.max(0, this.extent - this.follow), this.extent];
    this.drawLegend();
    this.redraw();
  }

  setView(begin, end) {
    const width = Math.min(Math.max(end - begin, MIN_VIEW), this.extent);
    const from = Math.min(Math.max(0, begin), this.extent - width);
    this.view = [from, from + width];
    this.redraw();
  }

  redraw() {
    if (this.dirty) return;
    this.dirty = true;
    requestAnimationFrame(() => {
      this.dirty = false;
      this.draw();
    });
  }

  // Lays out rows: workers one under the other, their lanes close together.
  layout() {
    const placed = [];
    const tall = new Set(this.rows.map((lane) => lane.worker)).size > MANY_WORKERS ? LOW_ROWS : ROWS;
    let y = AXIS + 2;
    let worker = null;
    for (const lane of this.rows) {
      if (worker !== null) y += lane.worker === worker ? 2 : tall.between;
      placed.push({ lane, y, height: tall[lane.lane] || 12, first: lane.worker !== worker });
      y += tall[lane.lane] || 12;
      worker = lane.worker;
    }
    return { placed, height: y + AXIS + 2 };
  }

  draw() {
    const width = this.stage.clientWidth;
    if (!width) return;
    const { placed, height } = this.layout();
    this.placed = placed;
    const paint = this.prepare(this.canvas, width, height);
    this.drawTimeAxis(paint, height);
    for (const row of placed) {
      this.drawLabel(paint, row);
      this.drawRow(paint, row);
    }
    this.drawStepAxis(paint, height);
    if (this.model.exact) this.drawExact(paint, height);
    if (this.picked !== null) drawPicked(this, paint);
    drawMap(this);
  }

  prepare(canvas, width, height) {
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const paint = canvas.getContext("2d");
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint.font = "12px system-ui, sans-serif";
    paint.textBaseline = "middle";
    return paint;
  }

  drawLabel(paint, { lane, y, height, first }) {
    paint.textAlign = "left";
    if (first) {
      paint.fillStyle = themeColour("ink");
      paint.fillText(lane.worker, 0, y + Math.max(height, 14) / 2, GUTTER - 42);
    } else if (lane.lane === "cpu" && known(lane.gpu)) {
      paint.fillStyle = themeColour("quiet");
      paint.fillText(`GPU ${lane.gpu}`, 0, y + height / 2, GUTTER - 42);
    }
    paint.fillStyle = themeColour("quiet");
    paint.textAlign = "right";
    if (height >= 10) paint.fillText(lane.lane, GUTTER - 8, y + height / 2);
  }

  drawRow(paint, { lane, y, height }) {
    paint.fillStyle = themeColour("lane-ground");
    paint.fillRect(GUTTER, y, this.plotWidth, height);
    const first = lane.firstAfter(this.view[0]);
    const last = this.lastBefore(lane, this.view[1]);
    if (last <= first) return;
    if (last - first > this.plotWidth / SPARSE_PIXELS) this.drawShares(paint, lane, y, height, first, last);
    else this.drawBoxes(paint, lane, y, height, first, last);
  }

  lastBefore(lane, time) {
    const start = lane.start;
    let low = 0;
    let high = start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  drawBoxes(paint, lane, y, height, first, last) {
    const { start, end, state, pack } = lane;
    const right = GUTTER + this.plotWidth;
    paint.textAlign = "center";
    for (let i = first; i < last; i++) {
      const x0 = Math.max(GUTTER, this.x(start[i]));
      const x1 = Math.min(right, this.x(end[i]));
      const width = Math.max(0.6, x1 - x0);
      const faded = this.picked !== null && pack[i] !== this.picked;
      paint.globalAlpha = faded ? 0.35 : 1;
      paint.fillStyle = this.model.colour(state[i]);
      paint.fillRect(x0, y, width > 3 ? width - 0.7 : width, height);
      if (height >= 16 && width > 46) this.drawBoxText(paint, lane, i, x0, y, width, height);
    }
    paint.globalAlpha = 1;
  }

  drawBoxText(paint, lane, i, x, y, width, height) {
    const name = this.model.stateNames[lane.state[i]].replace("_", " ");
    const full = lane.pack[i] >= 0 ? `${name} ${lane.pack[i]}` : name;
    const text = [full, name].find((one) => paint.measureText(one).width < width - 8);
    if (!text) return;
    paint.fillStyle = inkOn(this.model.colour(lane.state[i]));
    paint.fillText(text, x + width / 2, y + height / 2 + 0.5);
  }

  // Shares of states by device pixel, first state at the bottom.
  drawShares(paint, lane, y, height, first, last) {
    const ratio = window.devicePixelRatio || 1;
    const wide = Math.round(this.plotWidth * ratio);
    const tall = Math.round(height * ratio);
    const each = Math.max(1, Math.min(WIDEST_SHARE * ratio, Math.round((SHARED_SPANS * wide) / (last - first))));
    const shares = sharesByColumn(lane, first, last, this.view, wide / each, this.model.stateNames.length);
    const image = paint.createImageData(wide, tall);
    const pixels = new Uint32Array(image.data.buffer);
    pixels.fill(packedColour(themeColour("lane-ground")));
    const colours = this.model.stateNames.map((_, code) => packedColour(this.model.colour(code)));
    const count = colours.length;
    for (let column = 0; column < wide; column++) {
      const bin = Math.floor(column / each);
      let filled = 0;
      for (let code = 0; code < count; code++) {
        const share = shares[bin * count + code];
        if (share <= 0) continue;
        const top = Math.min(1, filled + share);
        for (let row = Math.round(filled * tall); row < Math.round(top * tall); row++) {
          pixels[(tall - 1 - row) * wide + column] = colours[code];
        }
        filled = top;
      }
    }
    paint.putImageData(image, Math.round(GUTTER * ratio), Math.round(y * ratio));
  }

  drawTimeAxis(paint, height) {
    const seconds = (this.view[1] - this.view[0]) / 1e6;
    const step = niceStep(seconds, Math.max(2, this.plotWidth / 110));
    const places = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
    paint.textAlign = "center";
    for (let tick = Math.ceil(this.view[0] / 1e6 / step) * step; tick <= this.view[1] / 1e6; tick += step) {
      const x = this.x(tick * 1e6);
      paint.fillStyle = themeColour("faint");
      paint.fillRect(x, AXIS - 4, 1, height - 2 * AXIS + 6);
      paint.fillStyle = themeColour("quiet");
      const text = formatClock(tick, Math.min(6, places));
      const half = paint.measureText(text).width / 2;
      if (x - half > GUTTER && x + half < GUTTER + this.plotWidth) paint.fillText(text, x, AXIS / 2);
    }
    paint.textAlign = "left";
    paint.fillStyle = themeColour("quiet");
    paint.fillText("time", 0, AXIS / 2);
  }

  drawStepAxis(paint, height) {
    const lane = this.rows.find((one) => one.lane === "cpu" && one.role !== "target" && one.length);
    paint.fillStyle = themeColour("quiet");
    paint.textAlign = "left";
    if (!lane) return;
    paint.fillText("step", 0, height - AXIS / 2);
    const { start, step } = lane;
    const [first, last] = [lane.firstAfter(this.view[0]), this.lastBefore(lane, this.view[1])];
    const every = niceCount((Math.max(-1, ...[last - 1, last - 2].map((i) => step[i] ?? -1)) - Math.max(0, step[first] ?? 0)) / (this.plotWidth / 70));
    paint.textAlign = "center";
    let free = GUTTER;
    let before = -1;
    for (let i = first; i < last; i++) {
      if (step[i] < 0 || step[i] === before || step[i] % every) continue;
      before = step[i];
      const x = this.x(start[i]);
      const text = formatNumber(step[i]);
      const half = paint.measureText(text).width / 2;
      if (x - half < free || x + half > GUTTER + this.plotWidth) continue;
      paint.fillRect(x, height - AXIS, 1, 4);
      paint.fillText(text, x, height - AXIS / 2 + 2);
      free = x + half + 26;
    }
  }

  drawExact(paint, height) {
    paint.fillStyle = themeColour("accent");
    for (const [low, high] of this.model.exact) {
      const x0 = Math.max(GUTTER, this.x(low * 1e6));
      const x1 = Math.min(GUTTER + this.plotWidth, this.x(high * 1e6));
      if (x1 > x0) paint.fillRect(x0, height - AXIS, Math.max(2, x1 - x0), 2);
    }
  }

  drawLegend() {
    const present = new Set();
    for (const lane of this.rows) {
      const state = lane.state;
      for (let i = 0; i < state.length; i++) present.add(state[i]);
    }
    const shown = this.model.stateNames.map((name, code) => [name, code]).filter(([, code]) => present.has(code));
    this.legend.replaceChildren(...shown.map(([name, code]) =>
      element("span", { title: this.model.stateTable[name].sentence },
        element("i", { class: "swatch", style: `background:${this.model.colour(code)}` }), name.replace("_", " "))));
  }
}

// Share of each column's time that each state has: Float32Array [columns × states]. The last column may be a part of one.
function sharesByColumn(lane, first, last, [begin, finish], parts, count) {
  const columns = Math.ceil(parts);
  const shares = new Float32Array(columns * count);
  const scale = parts / (finish - begin);
  const { start, end, state } = lane;
  for (let i = first; i < last; i++) {
    const from = Math.max(0, (start[i] - begin) * scale);
    const to = Math.min(columns, (end[i] - begin) * scale);
    const low = Math.floor(from);
    const high = Math.min(columns - 1, Math.floor(to));
    if (low === high) {
      shares[low * count + state[i]] += to - from;
      continue;
    }
    shares[low * count + state[i]] += low + 1 - from;
    for (let column = low + 1; column < high; column++) shares[column * count + state[i]] += 1;
    shares[high * count + state[i]] += to - high;
  }
  return shares;
}

function channels(colour) {
  const hex = colour.replace("#", "");
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function packedColour(colour) {
  const [red, green, blue] = channels(colour);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

function inkOn(colour) {
  const [red, green, blue] = channels(colour);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#16181b" : "#ffffff";
}

// The smallest of 1, 2, 5, 10, 20, ... that is not below a number.
function niceCount(wanted) {
  const power = 10 ** Math.max(0, Math.floor(Math.log10(Math.max(1, wanted))));
  return [1, 2, 5, 10].map((round) => round * power).find((round) => round >= wanted) || 10 * power;
}

// The round number of seconds that cuts a stretch into at most so many parts.
function niceStep(seconds, parts) {
  const rounds = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  const wanted = seconds / parts;
  if (wanted > 86400) return Math.ceil(wanted / 86400) * 86400;
  if (wanted > 1) return rounds.find((round) => round >= wanted);
  const power = 10 ** Math.floor(Math.log10(wanted));
  return [1, 2, 5, 10].map((round) => round * power).find((round) => round >= wanted * 0.999);
}
