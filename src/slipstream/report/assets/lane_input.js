// Mouse and keys of the lanes, the box that follows the pointer, and the buttons above them.

const NOTHING_PICKED = "Click a span to follow its pack from the target to the step that trains on it.";

function zoom(view, factor, centre = (view.view[0] + view.view[1]) / 2) {
  leaveFollow(view);
  const [begin, end] = view.view;
  view.setView(centre - (centre - begin) * factor, centre + (end - centre) * factor);
}

function pan(view, share) {
  leaveFollow(view);
  const move = (view.view[1] - view.view[0]) * share;
  view.setView(view.view[0] + move, view.view[1] + move);
}

function leaveFollow(view) {
  if (!view.follow) return;
  view.follow = 0;
  view.followButtons?.forEach((button) => button.setAttribute("aria-pressed", "false"));
}

function showWhole(view) {
  leaveFollow(view);
  view.setView(0, view.extent);
}

// From the first step to the last, with a little around it.
function showTraining(view) {
  const { training_after_seconds: after, training_seconds: seconds } = view.model.figures;
  if (!known(after)) return showWhole(view);
  leaveFollow(view);
  view.setView((after - 0.01 * seconds) * 1e6, (after + 1.01 * seconds) * 1e6);
}

function pick(view, pack) {
  view.picked = pack;
  view.status.textContent = pack === null ? NOTHING_PICKED : packStory(view, pack);
  view.redraw();
}

const KEYS = {
  ArrowLeft: (view) => pan(view, -0.2), ArrowRight: (view) => pan(view, 0.2),
  ArrowUp: (view) => zoom(view, 0.6), ArrowDown: (view) => zoom(view, 1 / 0.6),
  "+": (view) => zoom(view, 0.6), "=": (view) => zoom(view, 0.6), "-": (view) => zoom(view, 1 / 0.6),
  Home: (view) => view.setView(0, view.view[1] - view.view[0]),
  End: (view) => view.setView(view.extent - (view.view[1] - view.view[0]), view.extent),
  0: showWhole, Escape: (view) => pick(view, null),
};

function listenToKeys(view) {
  view.canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    view.tooltip.hidden = true;
    KEYS[event.key](view);
  });
}

// Dragging chooses a stretch to zoom to; with shift it moves the view; a click picks the pack under the pointer.
function listenToPointer(view) {
  const canvas = view.canvas;
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.offsetX < GUTTER) return;
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.offsetX, view: [...view.view], moves: event.shiftKey };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return showTooltip(view, event);
    view.tooltip.hidden = true;
    if (drag.moves) {
      const moved = ((drag.x - event.offsetX) / view.plotWidth) * (drag.view[1] - drag.view[0]);
      leaveFollow(view);
      view.setView(drag.view[0] + moved, drag.view[1] + moved);
    } else {
      view.draw();
      const paint = canvas.getContext("2d");
      paint.fillStyle = themeColour("shadow");
      paint.fillRect(Math.min(drag.x, event.offsetX), 0, Math.abs(event.offsetX - drag.x), canvas.clientHeight);
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const [low, high] = [drag.x, Math.max(GUTTER, event.offsetX)].sort((one, other) => one - other);
    if (!drag.moves && high - low > 4) {
      leaveFollow(view);
      view.setView(view.timeAt(low), view.timeAt(high));
    } else if (!drag.moves) {
      const found = spanUnder(view, event);
      pick(view, found && found.lane.pack[found.place] >= 0 ? found.lane.pack[found.place] : null);
    }
    drag = null;
  });
  canvas.addEventListener("dblclick", () => showWhole(view));
  canvas.addEventListener("pointerleave", () => { view.tooltip.hidden = true; });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(view, event.deltaX / 800);
    else zoom(view, Math.exp(event.deltaY / 400), view.timeAt(event.offsetX));
  }, { passive: false });
  listenToMap(view);
}

function listenToMap(view) {
  const moveTo = (event) => {
    const centre = ((event.offsetX - GUTTER) / view.plotWidth) * view.extent;
    const half = (view.view[1] - view.view[0]) / 2;
    leaveFollow(view);
    view.setView(centre - half, centre + half);
  };
  view.map.addEventListener("pointerdown", (event) => {
    view.map.setPointerCapture(event.pointerId);
    moveTo(event);
  });
  view.map.addEventListener("pointermove", (event) => { if (event.buttons & 1) moveTo(event); });
}

function spanUnder(view, event) {
  const row = view.placed.find(({ y, height }) => event.offsetY >= y - 1 && event.offsetY <= y + height + 1);
  if (!row || event.offsetX < GUTTER) return null;
  return { lane: row.lane, row, place: row.lane.at(view.timeAt(event.offsetX)) };
}

function showTooltip(view, event) {
  const found = spanUnder(view, event);
  view.tooltip.hidden = !found;
  if (!found) return;
  const { lane, place } = found;
  const pixel = (view.view[1] - view.view[0]) / view.plotWidth;
  const narrow = place < 0 || lane.end[place] - lane.start[place] < 1.5 * pixel;
  view.tooltip.replaceChildren(...(narrow ? sharesText(view, lane, view.timeAt(event.offsetX), pixel) : spanText(view, lane, place)));
  const left = event.offsetX + 16 + view.tooltip.offsetWidth > view.stage.clientWidth ? event.offsetX - 12 - view.tooltip.offsetWidth : event.offsetX + 16;
  view.tooltip.style.left = `${Math.max(0, left)}px`;
  view.tooltip.style.top = `${view.canvas.offsetTop + event.offsetY + 14}px`;
}

function swatch(view, code) {
  return element("i", { class: "swatch", style: `background:${view.model.colour(code)}` });
}

function spanText(view, lane, place) {
  const name = view.model.stateNames[lane.state[place]];
  const rows = [
    ["duration", formatSeconds((lane.end[place] - lane.start[place]) / 1e6)],
    ["from", formatClock(lane.start[place] / 1e6, 3)],
  ];
  if (lane.pack[place] >= 0) rows.push(["pack", lane.pack[place]]);
  if (lane.step[place] >= 0) rows.push(["step", lane.step[place]]);
  return [
    element("div", {}, swatch(view, lane.state[place]), " ", element("b", {}, name.replace("_", " ")), ` · ${lane.worker}, ${lane.lane}`),
    element("table", {}, rows.map(([title, value]) => element("tr", {}, element("td", { class: "quiet" }, title), element("td", {}, String(value))))),
    element("div", { class: "quiet" }, view.model.stateTable[name].sentence),
  ];
}

// Where one pixel holds many spans, or none: the shares of the stretch around it.
function sharesText(view, lane, time, pixel) {
  const stretch = [time - 2 * pixel, time + 2 * pixel];
  const count = view.model.stateNames.length;
  const shares = sharesByColumn(lane, lane.firstAfter(stretch[0]), view.lastBefore(lane, stretch[1]), stretch, 1, count);
  const named = [...shares].map((share, code) => [share, code]).filter(([share]) => share > 0.005).sort((one, other) => other[0] - one[0]);
  const rows = named.slice(0, 6).map(([share, code]) =>
    element("tr", {}, element("td", {}, swatch(view, code), ` ${view.model.stateNames[code].replace("_", " ")}`), element("td", { class: "numbers" }, formatShare(share))));
  return [
    element("div", {}, element("b", {}, lane.worker), `, ${lane.lane} · around ${formatClock(time / 1e6, 1)}`),
    rows.length ? element("table", {}, rows) : element("div", { class: "quiet" }, "nothing here"),
  ];
}

function laneToolbar(view, { live }) {
  view.status.textContent = NOTHING_PICKED;
  const press = (name, title, act) => element("button", { type: "button", title, onclick: act }, name);
  const step = element("input", { type: "number", min: "0", "aria-label": "step to show", placeholder: "step" });
  const showStep = () => {
    const span = view.model.spanOfStep(Number(step.value));
    view.status.textContent = span || step.value === "" ? NOTHING_PICKED : `No spans of step ${step.value} are held.`;
    if (!span || step.value === "") return;
    leaveFollow(view);
    view.setView(span[0] - (span[1] - span[0]) * 0.5, span[1] + (span[1] - span[0]) * 0.5);
  };
  step.addEventListener("change", showStep);
  const threads = element("button", { type: "button", "aria-pressed": "false", title: "Lanes of the threads beside a worker's own" }, "loader and writer");
  threads.addEventListener("click", () => {
    view.showThreads = !view.showThreads;
    threads.setAttribute("aria-pressed", String(view.showThreads));
    view.dataChanged(false);
  });
  view.followButtons = live ? [["10 s", 10], ["1 min", 60], ["10 min", 600]].map(([name, seconds]) => followButton(view, name, seconds)) : [];
  const hasThreads = view.model.lanes.some((lane) => ["loader", "writer"].includes(lane.lane));
  return element("div", { class: "toolbar" },
    press("−", "Zoom out (minus)", () => zoom(view, 2)), press("+", "Zoom in (plus)", () => zoom(view, 0.5)),
    press("◂", "Earlier (left)", () => pan(view, -0.5)), press("▸", "Later (right)", () => pan(view, 0.5)),
    press("Whole run", "Show all of it (0)", () => showWhole(view)), press("Training", "From the first step to the last", () => showTraining(view)),
    live ? element("span", { class: "quiet" }, "follow the last") : null, view.followButtons,
    step, press("Go to step", "Show one step", showStep), hasThreads ? threads : null,
    element("span", { class: "quiet push" }, "drag: zoom · shift-drag: move · keys: arrows + − 0"));
}

function followButton(view, name, seconds) {
  const button = element("button", { type: "button", "aria-pressed": String(view.follow === seconds * 1e6) }, name);
  button.addEventListener("click", () => {
    view.follow = seconds * 1e6;
    view.followButtons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    view.dataChanged(false);
  });
  return button;
}
