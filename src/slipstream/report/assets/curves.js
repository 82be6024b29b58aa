// Charts by uPlot. A chart is described by a function that is asked again when data, size or colour scheme change.

const CHART_HEIGHT = 190;
const WHOLE_STEPS = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((power) => [power, 2 * power, 5 * power]);
const SERIES = {
  light: ["#4477aa", "#cc6644", "#228833", "#aa3377", "#8a7a20", "#1a8fa8", "#555555", "#884488"],
  dark: ["#82b4ec", "#f0997a", "#6fca80", "#e078b4", "#d6c65c", "#66ccee", "#bbbbbb", "#c79ae0"],
};

function seriesColour(index) {
  const palette = SERIES[darkScheme.matches ? "dark" : "light"];
  return palette[index % palette.length];
}

// describe() -> {x, series: [{label, values, thin, dashed, points, colour}], text: how a value is written, log, fromZero, xName} or null
class Chart {
  constructor(title, describe, { hint = "" } = {}) {
    this.describe = describe;
    this.holder = element("div", { class: "plot" });
    this.root = element("div", { class: "chart", "data-chart": title }, element("h3", { title: hint || null }, title), this.holder);
    this.width = 0;
    new ResizeObserver(() => {
      if (this.holder.clientWidth !== this.width) this.draw();
    }).observe(this.holder);
    darkScheme.addEventListener("change", () => this.draw());
  }

  draw() {
    const found = this.describe();
    this.root.hidden = !found;
    if (!found) return;
    this.width = this.holder.clientWidth;
    if (!this.width) return;
    const data = [found.x, ...found.series.map(({ values }) => values)];
    const shape = JSON.stringify([this.width, darkScheme.matches, found.series.map(({ label }) => label), found.log]);
    if (this.plot && shape === this.shape) {
      this.plot.setData(data);
      return;
    }
    this.shape = shape;
    this.plot?.destroy();
    this.plot = new uPlot(this.options(found), data, this.holder);
  }

  options({ series, text = formatNumber, log = false, fromZero = false, xName = "step" }) {
    const [quiet, faint] = [themeColour("quiet"), themeColour("faint")];
    const axis = { stroke: quiet, grid: { stroke: faint, width: 1 }, ticks: { stroke: faint, width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
    const byStep = xName === "step";
    return {
      width: this.width,
      height: CHART_HEIGHT,
      cursor: { sync: { key: xName, setSeries: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: fromZero ? { range: (_, low, high) => [0, 1.08 * high || 1] } : { distr: log ? 3 : 1 } },
      legend: { live: true },
      hooks: { setLegend: [showLast] },
      axes: [
        { ...axis, size: 28, values: (_, ticks) => ticks.map((tick) => (byStep ? formatRate(tick) : formatClock(tick))), incrs: byStep ? WHOLE_STEPS : [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800] },
        { ...axis, size: 56, values: (_, ticks) => tickLabels(ticks, text) },
      ],
      series: [
        { label: xName, value: (_, value) => (known(value) ? (byStep ? formatNumber(value) : formatClock(value, 1)) : "–") },
        ...series.map((one, index) => seriesOptions(one, index, text)),
      ],
    };
  }
}

function seriesOptions({ label, thin, dashed, points, colour, step }, index, text) {
  const stroke = colour || seriesColour(index);
  return {
    label, stroke: thin ? `${stroke}55` : stroke, width: thin ? 1 : 1.6, dash: dashed ? [5, 4] : undefined, spanGaps: Boolean(points || step),
    points: { show: Boolean(points), size: 6, fill: stroke, stroke },
    value: (_, value) => (known(value) ? text(value) : "–"),
  };
}

// Without a pointer over it, a legend tells the newest values.
function showLast(plot) {
  if (!known(plot.legend.idx)) plot.setLegend({ idxs: plot.data.map(lastKnown) }, false);
}

function lastKnown(values) {
  let place = values.length - 1;
  while (place > 0 && !known(values[place])) place--;
  return place;
}

// Mean of a window of values around each, nulls left out; about a fiftieth of the run wide.
function smooth(values, width = Math.max(1, Math.round(values.length / 50))) {
  if (width < 3) return values;
  const half = width >> 1;
  const found = new Array(values.length);
  let sum = 0;
  let count = 0;
  const add = (value, sign) => {
    if (value === null || value === undefined) return;
    sum += sign * value;
    count += sign;
  };
  for (let i = 0; i < Math.min(half, values.length); i++) add(values[i], 1);
  for (let i = 0; i < values.length; i++) {
    if (i + half < values.length) add(values[i + half], 1);
    if (i - half - 1 >= 0) add(values[i - half - 1], -1);
    found[i] = count ? sum / count : null;
  }
  return found;
}

// Several columns over x of their own on one x: null where a column has no value.
function align(parts) {
  const x = [...new Set(parts.flatMap((part) => part.x))].sort((one, other) => one - other);
  const place = new Map(x.map((value, index) => [value, index]));
  const columns = parts.map((part) => {
    const column = new Array(x.length).fill(null);
    part.x.forEach((value, index) => { column[place.get(value)] = part.values[index]; });
    return column;
  });
  return { x, columns };
}

// A curve by step: each value thin, its running mean strong; validations as points of their own. Several runs: means only.
// A sparse one has no value at most steps, and stands on zero.
function trainChart(models, title, column, { text = formatNumber, log = false, hint = "", validation = false, level = null, raw = true, sparse = false } = {}) {
  return new Chart(title, () => {
    const parts = [];
    models().forEach((model, index) => {
      const prefix = models().length > 1 ? `${model.label} ` : "";
      const values = model.train.columns[column];
      const colour = seriesColour(index);
      if (values) {
        const x = model.train.step;
        if (models().length === 1 && raw && values.length >= 150) parts.push({ x, values, label: "each step", thin: true, colour });
        parts.push({ x, values: raw ? smooth(values) : values, label: `${prefix}${raw && values.length >= 150 ? "mean" : "train"}`, colour, points: values.length < 3, step: sparse });
      }
      if (validation && model.validations.length) {
        const rows = model.validations.filter((row) => known(row[column]));
        const own = models().length === 1 ? seriesColour(1) : colour;
        parts.push({ x: rows.map((row) => row.step), values: rows.map((row) => row[column]), label: `${prefix}validation`, colour: own, points: true, dashed: models().length > 1 });
      }
      const height = level && models().length === 1 ? level(model) : null;
      if (known(height) && model.train.step.length > 1) {
        const ends = [model.train.step[0], model.train.step[model.train.step.length - 1]];
        parts.push({ x: ends, values: [height, height], label: "predicted", dashed: true, step: true, colour: seriesColour(1) });
      }
    });
    if (!parts.length) return null;
    const { x, columns } = align(parts);
    return { x, series: parts.map((part, index) => ({ ...part, values: columns[index] })), text, log, fromZero: sparse };
  }, { hint });
}

function trainCharts(models) {
  return [
    trainChart(models, "Loss", "loss", { hint: "weighted mean cross-entropy in nats" }),
    trainChart(models, "Acceptance length", "acceptance_length", { validation: true, hint: "tokens per verification step, the target's own included" }),
    trainChart(models, "Context tokens per second", "context_tokens_per_second", { text: formatRate, level: (model) => model.figures.rates.predicted_tokens_per_second }),
    trainChart(models, "Accuracy", "accuracy", { text: (value, digits = 1) => formatShare(value, digits), hint: "share of supervised slots that are right" }),
    trainChart(models, "Gradient norm", "gradient_norm", { log: true, hint: "before clipping" }),
    trainChart(models, "Seconds per step", "seconds", { text: formatSeconds }),
    trainChart(models, "Learning rate", "learning_rate", { raw: false, text: (value, digits = 1) => (value ? value.toExponential(digits) : "0") }),
    trainChart(models, "Model FLOPs utilisation", "mfu", { text: (value, digits = 1) => formatShare(value, digits) }),
    slotChart(models),
    trainChart(models, "Supervised tokens per second", "supervised_tokens_per_second", { text: formatRate }),
    trainChart(models, "Anchors per second", "anchors_per_second", { text: formatRate }),
    trainChart(models, "Token fill", "token_fill", { text: (value, digits = 1) => formatShare(value, digits), hint: "context tokens of a step, of what its packs can hold" }),
    trainChart(models, "Anchor fill", "anchor_fill", { text: (value, digits = 1) => formatShare(value, digits), hint: "anchors of a step, of what its packs can hold" }),
    trainChart(models, "Memory of the process", "memory_bytes", { raw: false, sparse: true, text: formatBytes, hint: "resident in host memory, of the process that trains (rank 0)" }),
    trainChart(models, "Memory on its GPU", "device_allocated_bytes", { raw: false, sparse: true, text: formatBytes, hint: "handed out by torch's allocator, about once a second" }),
  ];
}

// Accuracy of each slot of the block over the run: one line a slot, the first darkest. Of one run.
function slotChart(models) {
  return new Chart("Accuracy by slot", () => {
    const { step, columns } = models()[0].slots;
    if (models().length > 1 || step.length < 2) return null;
    const shade = (slot) => `hsl(${215 + (110 * slot) / Math.max(1, columns.length - 1)} 60% ${darkScheme.matches ? 68 : 45}%)`;
    return { x: step, series: columns.map((values, slot) => ({ label: String(slot + 1), values, colour: shade(slot) })), text: (value) => formatShare(value) };
  }, { hint: "share of supervised slots that are right; slot 1 is the first drafted token" });
}

// A chart by time of one or more columns of samples, one line for each of what was sampled. Where samples jump from one to the
// next and lines would hide each other, `mean` draws the running mean of many.
function sampleChart(held, title, names, { text = formatNumber, who = (key) => key, mean = false, hint = mean ? "running mean" : "" } = {}) {
  return new Chart(title, () => {
    const parts = [];
    for (const [key, samples] of held()) {
      for (const [name, label] of Object.entries(names)) {
        if (samples.columns[name]) parts.push({ x: samples.time, values: mean && samples.time.length >= 300 ? smooth(samples.columns[name]) : samples.columns[name], label: `${who(key)} ${label}`.trim() });
      }
    }
    if (!parts.length) return null;
    const { x, columns } = align(parts);
    return { x, series: parts.map((part, index) => ({ ...part, values: columns[index], step: true })), text, xName: "time" };
  }, { hint });
}
