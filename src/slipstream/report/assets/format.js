// Elements and text: how numbers, times and sizes are written everywhere on the page.

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "style") made.style.cssText = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

function formatNumber(value, digits = 4) {
  if (!known(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en-GB");
  return String(Number(value.toPrecision(digits)));
}

function formatRate(value) {
  if (!known(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
  return value >= 1e4 ? `${(value / 1e3).toFixed(1)}K` : formatNumber(value, 3);
}

const formatShare = (value, digits = 0) => (known(value) ? `${(100 * value).toFixed(digits)} %` : "–");

// Ticks of an axis: with as many digits as it takes to tell neighbours apart, where the text knows of digits.
function tickLabels(ticks, text) {
  let labels = [];
  for (const digits of [undefined, 1, 2, 3, 4, 5, 6, 7]) {
    labels = ticks.map((tick) => (tick === null ? "" : digits === undefined ? text(tick) : text(tick, digits)));
    const shown = labels.filter((label) => label !== "");
    if (new Set(shown).size === shown.length) break;
  }
  return labels;
}

function formatBytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  const power = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(1, value)) / 3)));
  return `${(value / 1000 ** power).toFixed(power > 2 ? 1 : 0)} ${units[power]}`;
}

function formatSeconds(seconds) {
  if (!known(seconds)) return "–";
  const size = Math.abs(seconds);
  if (size < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${(seconds * 1e3).toPrecision(3)} ms`;
  if (size < 120) return `${seconds.toPrecision(3)} s`;
  return formatClock(seconds);
}

function formatClock(seconds, places = 0) {
  const sign = seconds < 0 ? "-" : "";
  const scale = 10 ** places;
  const whole = Math.round(Math.abs(seconds) * scale) / scale;
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  const rest = (whole % 60).toFixed(places).padStart(places ? 3 + places : 2, "0");
  return `${sign}${hours ? `${hours}:${String(minutes).padStart(2, "0")}` : minutes}:${rest}`;
}

// Columns: [title, value of a row, options]. Options: number (right-aligned), text (how to write it), class of the cell.
function table(rows, columns) {
  const head = columns.map(([title, , options = {}]) => element("th", { class: options.number ? "number" : null }, title));
  const body = rows.map((row) =>
    element("tr", {}, columns.map(([, value, options = {}]) => {
      const found = value(row);
      if (found instanceof Node) return element("td", { class: options.class }, found);
      const text = options.text ? options.text(found, row) : options.number ? formatNumber(found) : known(found) ? String(found) : "–";
      const classes = [options.number ? "number" : "", typeof options.class === "function" ? options.class(row) : options.class || ""];
      return element("td", { class: classes.join(" ").trim() || null }, text);
    })));
  return element("div", { class: "scroll" }, element("table", { class: "data" },
    element("thead", {}, element("tr", {}, head)), element("tbody", {}, body)));
}

function section(id, title, ...children) {
  return element("section", { id, "data-title": title }, title ? element("h2", {}, title) : null, children);
}

const note = (...children) => element("p", { class: "note" }, children);
const darkScheme = window.matchMedia("(prefers-color-scheme: dark)");
const themeColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
