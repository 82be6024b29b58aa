// What is drawn over and around the lanes: the strip of the whole run, and the way of one pack from target to training.

const MAP_HEIGHT = 26;

// Mean share of training work over all lanes "gpu" (or "cpu" where there is none), with the view marked in it.
function drawMap(view) {
  const width = view.stage.clientWidth;
  const paint = view.prepare(view.map, width, MAP_HEIGHT);
  const columns = Math.floor(view.plotWidth);
  if (!view.mapShares || view.mapShares.length !== columns) view.mapShares = workShares(view.model, columns, view.extent);
  paint.fillStyle = themeColour("lane-ground");
  paint.fillRect(GUTTER, 0, columns, MAP_HEIGHT - 4);
  paint.fillStyle = themeColour("quiet");
  paint.textAlign = "left";
  paint.fillText("work, whole run", 0, (MAP_HEIGHT - 4) / 2, GUTTER - 8);
  paint.globalAlpha = 0.55;
  for (let column = 0; column < columns; column++) {
    const tall = view.mapShares[column] * (MAP_HEIGHT - 4);
    paint.fillRect(GUTTER + column, MAP_HEIGHT - 4 - tall, 1, tall);
  }
  const from = GUTTER + (view.view[0] / view.extent) * columns;
  const to = Math.max(from + 3, GUTTER + (view.view[1] / view.extent) * columns);
  paint.fillStyle = themeColour("ground");
  paint.globalAlpha = 0.6;
  paint.fillRect(GUTTER, 0, from - GUTTER, MAP_HEIGHT - 4);
  paint.fillRect(to, 0, GUTTER + columns - to, MAP_HEIGHT - 4);
  paint.globalAlpha = 1;
  paint.strokeStyle = themeColour("accent");
  paint.lineWidth = 1.5;
  paint.strokeRect(from + 0.75, 0.75, Math.max(1.5, to - from - 1.5), MAP_HEIGHT - 5.5);
}

function workShares(model, columns, extent) {
  const onGpu = model.lanes.some((lane) => lane.lane === "gpu");
  const lanes = model.lanes.filter((lane) => lane.lane === (onGpu ? "gpu" : "cpu") && lane.role !== "answers" && lane.role !== "supervisor");
  const work = model.stateNames.map((name) => model.stateTable[name].kind === "work" && !["load", "warm_up"].includes(name));
  const total = new Float32Array(columns);
  for (const lane of lanes) {
    const shares = sharesByColumn(lane, 0, lane.length, [0, extent], columns, work.length);
    for (let column = 0; column < columns; column++) {
      for (let code = 0; code < work.length; code++) if (work[code]) total[column] += shares[column * work.length + code] / lanes.length;
    }
  }
  return total.map((share) => Math.min(1, share));
}

// All spans of a pack: [{row, lane, place}], by time.
function spansOfPack(view, pack) {
  const found = [];
  for (const row of view.placed) {
    const packs = row.lane.pack;
    for (let place = packs.indexOf(pack); place >= 0; place = packs.indexOf(pack, place + 1)) found.push({ row, lane: row.lane, place });
  }
  return found.sort((one, other) => one.lane.start[one.place] - other.lane.start[other.place]);
}

// From the target's last forward of a pack before it, to each training forward of it. The lane "gpu" counts where there is one.
function journeys(view, pack) {
  const names = view.model.stateNames;
  const spans = spansOfPack(view, pack);
  const onGpu = spans.some(({ lane }) => lane.lane === "gpu");
  let made = null;
  const found = [];
  for (const span of spans) {
    if ((span.lane.lane === "gpu") !== onGpu) continue;
    const state = names[span.lane.state[span.place]];
    if (state === "target") made = span;
    else if (made && (state === "forward" || state === "forward_backward")) found.push([made, span]);
  }
  return found;
}

function drawPicked(view, paint) {
  paint.save();
  paint.beginPath();
  paint.rect(GUTTER, 0, view.plotWidth, view.canvas.clientHeight);
  paint.clip();
  paint.strokeStyle = paint.fillStyle = themeColour("ink");
  paint.lineWidth = 1.5;
  for (const { row, lane, place } of spansOfPack(view, view.picked)) {
    const x0 = view.x(lane.start[place]);
    const width = Math.max(2, view.x(lane.end[place]) - x0);
    paint.strokeRect(x0, row.y - 0.5, width, row.height + 1);
  }
  for (const [from, to] of journeys(view, view.picked)) {
    const x0 = view.x(from.lane.end[from.place]);
    const x1 = view.x(to.lane.start[to.place]);
    const y0 = from.row.y + from.row.height / 2;
    const y1 = to.row.y + to.row.height / 2;
    const bend = Math.max(18, Math.abs(x1 - x0) / 2.5);
    paint.beginPath();
    paint.moveTo(x0, y0);
    paint.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    paint.stroke();
    paint.beginPath();
    paint.moveTo(x1, y1);
    paint.lineTo(x1 - 7, y1 - 4);
    paint.lineTo(x1 - 7, y1 + 4);
    paint.fill();
  }
  paint.restore();
}

// Where a pack was made and used, in words.
function packStory(view, pack) {
  const uses = journeys(view, pack);
  if (!uses.length) return `Pack ${pack}: ${spansOfPack(view, pack).length} spans; no training step of it here.`;
  const told = uses.map(([from, to]) => {
    const between = (to.lane.start[to.place] - from.lane.end[from.place]) / 1e6;
    return `${to.lane.worker} in step ${to.lane.step[to.place]}, ${formatSeconds(Math.max(0, between))} later`;
  });
  const [from] = uses[0];
  const took = (from.lane.end[from.place] - from.lane.start[from.place]) / 1e6;
  return `Pack ${pack}: forward of the target on ${from.lane.worker} (${formatSeconds(took)}), then trained by ${told.join("; ")}.`;
}
