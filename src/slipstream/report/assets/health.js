// The first screen: what state the run is in, what limits it, and the figures that say whether it is well.

const SILENT_SECONDS = 60;

function drawHeader(model, live) {
  const { figures } = model;
  const silent = live && !model.ended && model.now - model.end > SILENT_SECONDS;
  const status = document.getElementById("status");
  status.textContent = silent ? `${figures.status || "unknown"}, but silent for ${formatSeconds(model.now - model.end)}` : figures.status || "unknown";
  status.className = `pill ${silent ? "silent" : figures.status || ""}`;
  const left = known(figures.time_left_seconds) ? `, ${formatClock(figures.time_left_seconds)} left` : "";
  const of = known(figures.steps) ? ` of ${formatNumber(figures.steps)}` : "";
  document.getElementById("progress").textContent = `step ${formatNumber(figures.step)}${of} · ${formatClock(figures.seconds)}${left}${live ? " · live" : ""}`;
}

function verdictSection(model, live) {
  const { verdict, figures } = model;
  // The headline opens with the first finding, and the first of its advice: it is not told twice.
  const [first] = verdict.findings;
  const told = first && verdict.headline.includes(first.sentence);
  const more = first ? first.advice.split("; ").slice(1) : [];
  const findings = verdict.findings.slice(told ? 1 : 0).map((finding) =>
    element("li", { "data-kind": finding.kind },
      element("span", { class: "kind" }, finding.kind.replaceAll("_", " ")),
      element("span", { class: "lost numbers", title: "share of the time that is lost to it" }, known(finding.share_lost) ? formatShare(finding.share_lost) : ""),
      element("div", {}, `${finding.sentence}. `, element("span", { class: "advice" }, finding.advice,
        known(finding.predicted_gain) && !finding.advice.includes("predicted to give") ? element("b", {}, ` Predicted gain: ${formatGain(finding.predicted_gain)}.`) : null))));
  return section("verdict", null,
    element("p", { class: "headline" }, verdict.headline),
    told ? element("p", { class: "tag", "data-kind": first.kind }, first.kind.replaceAll("_", " "),
      known(first.share_lost) ? [" · ", element("b", {}, formatShare(first.share_lost)), " of the time is lost to it"] : null) : null,
    told && more.length ? element("p", { class: "advice" }, `Also: ${more.join("; ")}.`) : null,
    figures.cause ? element("p", { class: "note" }, `It ended because: ${figures.cause}`) : null,
    findings.length ? element("ol", {}, findings) : null,
    live && !model.ended ? element("p", { class: "note" }, "Of the newest five minutes; the report is of the whole run.") : null);
}

const formatGain = (gain, digits = 0) => `${gain >= 0 ? "+" : "−"}${formatShare(Math.abs(gain), digits)}`;

function keyFigures(model) {
  const { figures } = model;
  const { rates, results } = figures;
  const validation = results.validation;
  const best = validation ? `best ${formatNumber(validation.best.acceptance_length, 3)}, step ${formatNumber(validation.best.step)}` : "";
  // Over wall time, as the verdict has it, validations and checkpoints included; and what they leave of it.
  const overall = model.verdict.tokens_per_second;
  const within = `${formatRate(model.verdict.steady_tokens_per_second ?? rates.context_tokens_per_second)} within steps`;
  const faults = [[results.skipped_steps, "steps skipped"], [results.bad_rows, "rows not finite"], [results.rejected_seals, "packs came damaged"]];
  const faulty = faults.filter(([count]) => count).map(([count, what]) => `${formatNumber(count)} ${what}`).join(", ");
  const items = [
    ["Context tokens/s", formatRate(overall ?? rates.context_tokens_per_second), within],
    ["Acceptance, validated", validation ? formatNumber(validation.last.acceptance_length, 3) : "–", best],
    ["Acceptance, training", formatNumber(results.acceptance_length, 3), `accuracy ${formatShare(results.accuracy, 1)}`],
    ["Loss", formatNumber(results.loss, 3), faulty || "no step skipped"],
    ["Seconds per step", formatSeconds(rates.seconds_per_step), `${formatRate(results.context_tokens)} tokens trained`],
    ...roleFigures(figures.workers),
  ];
  return element("section", { id: "key-figures" }, items.map(([name, value, also]) =>
    element("div", {}, element("div", { class: "name" }, name), element("div", { class: "value" }, value), element("div", { class: "also", title: also }, also))));
}

function roleFigures(workers) {
  const roles = new Map();
  for (const worker of workers) {
    if (!["target", "drafter", "colocated", "worker"].includes(worker.role)) continue;
    roles.set(worker.role, [...(roles.get(worker.role) || []), worker]);
  }
  const names = { target: "Targets at work", drafter: "Drafters at work", colocated: "Workers at work", worker: "Workers at work" };
  const gpus = { target: "Target GPUs busy", drafter: "Drafter GPUs busy", colocated: "GPUs busy", worker: "GPUs busy" };
  return [...roles].map(([role, members]) => {
    // Where devices were timed, their time counts: the thread that launches has little to do and waits for them.
    const timed = members.every((worker) => worker.gpu_kinds);
    const mean = (kind) => members.reduce((sum, worker) => sum + (timed ? worker.gpu_kinds : worker.kinds)[kind], 0) / members.length;
    const also = `${timed && !mean("wait") ? "" : `waiting ${formatShare(mean("wait"))}, `}idle ${formatShare(mean("idle"))}`;
    return [`${(timed ? gpus : names)[role]} (${members.length})`, formatShare(mean("work")), also];
  });
}

// One stacked bar a worker, and the same numbers as a table.
function timeSection(model) {
  const parts = [
    ["While it trained, by the worker's own thread", (worker) => worker.training],
    ["While it trained, on the GPU", (worker) => worker.gpu_training],
    ["From start to end", (worker) => worker.whole],
  ];
  const { workers } = model.figures;
  const dropped = workers.reduce((sum, worker) => sum + worker.dropped_spans, 0);
  return section("time", "Where the time went",
    note("Every second of a worker is in one state. The first two are from the first to the last span of a step; on the GPU only the stages of a step are timed, so validation counts as idle there."),
    dropped ? note(`${formatNumber(dropped)} spans could not be kept: lanes have holes, the accounts below do not.`) : null,
    parts.map(([title, states]) => {
      const shown = workers.filter((worker) => Object.keys(states(worker)).length);
      return shown.length ? element("div", {}, element("h3", {}, title), stateBars(model, shown, states), stateTable(model, shown, states)) : null;
    }));
}

function stateBars(model, workers, states) {
  const bars = workers.map((worker) => {
    const held = states(worker);
    const total = Object.values(held).reduce((sum, seconds) => sum + seconds, 0);
    const pieces = inOrder(model, Object.keys(held)).map((name) => {
      const share = held[name] / total;
      const colour = model.colour(model.codesFor([name])[name]);
      const text = share > 0.07 ? `${name.replace("_", " ")} ${formatShare(share)}` : "";
      return element("i", { style: `width:${100 * share}%;background:${colour};color:${inkOn(colour)}`, title: `${name}: ${formatSeconds(held[name])}, ${formatShare(share, 1)}` }, text);
    });
    return [element("span", { class: "who" }, worker.worker), element("div", { class: "bar", role: "img", "aria-label": `states of ${worker.worker}` }, pieces), element("span", { class: "total" }, formatClock(total))];
  });
  return element("div", { class: "bars" }, bars);
}

function stateTable(model, workers, states) {
  const names = inOrder(model, [...new Set(workers.flatMap((worker) => Object.keys(states(worker))))]);
  const columns = [["state", (name) => element("span", {}, element("i", { class: "swatch", style: `background:${model.colour(model.codesFor([name])[name])}` }), ` ${name.replace("_", " ")}`)]];
  for (const worker of workers) {
    const total = Object.values(states(worker)).reduce((sum, seconds) => sum + seconds, 0);
    columns.push([worker.worker, (name) => states(worker)[name], { number: true, text: (seconds) => (known(seconds) ? `${formatSeconds(seconds)} · ${formatShare(seconds / total, 1)}` : "") }]);
  }
  columns.push(["", (name) => model.stateTable[name].sentence, { class: "quiet" }]);
  return element("details", {}, element("summary", {}, "the numbers"), table(names, columns));
}

function inOrder(model, names) {
  return names.sort((one, other) => model.codesFor([one])[one] - model.codesFor([other])[other]);
}
