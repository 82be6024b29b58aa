// The tables further down: stages, queues, GPUs, memory, mixing, validations, and what the run was started with.

function stagesSection(model) {
  const rows = model.figures.stages;
  if (!rows.length) return null;
  const seconds = { number: true, text: formatSeconds };
  return section("stages", "Stages of a step",
    note("While it trained. Per step: total over the steps that the worker has spans of."),
    table(rows, [
      ["worker", (row) => row.worker], ["lane", (row) => row.lane], ["state", (row) => row.state.replace("_", " ")],
      ["count", (row) => row.count, { number: true }], ["per step", (row) => row.seconds_per_step, seconds], ["mean", (row) => row.mean, seconds],
      ["median", (row) => row.p50, seconds], ["90 %", (row) => row.p90, seconds], ["99 %", (row) => row.p99, seconds],
      ["longest", (row) => row.longest, seconds], ["total", (row) => row.seconds, seconds],
    ]));
}

function queuesSection(model, charts) {
  const rows = model.figures.queues;
  if (!rows.length) return null;
  const bytes = { number: true, text: formatBytes };
  const share = { number: true, text: (value) => formatShare(value) };
  return section("queues", "Queues of hidden states",
    note(model.figures.workers.some((worker) => worker.role === "target")
      ? "Packs that lie ready for a drafter rank. Always empty: the targets are slow. Always full: the drafter is. Swinging between both: bursts."
      : "Packs that a process has made ahead of the steps that train on them. The table: while it trained."),
    element("div", { class: "charts" }, charts.map((chart) => chart.root)),
    table(rows, [
      ["rank", (row) => row.rank, { number: true }], ["slots", (row) => row.slots, { number: true }],
      ["ready 10 %", (row) => row.ready_p10, { number: true }], ["ready median", (row) => row.ready_p50, { number: true }],
      ["ready 90 %", (row) => row.ready_p90, { number: true }], ["ready mean", (row) => row.ready_mean, { number: true }],
      ["bytes median", (row) => row.ready_bytes_p50, bytes], ["bytes 90 %", (row) => row.ready_bytes_p90, bytes],
      ["in work, mean", (row) => row.issued_mean, { number: true }], ["time at empty", (row) => row.share_empty, share], ["time at full", (row) => row.share_full, share],
    ]));
}

function gpusSection(model, charts) {
  const rows = model.figures.gpus;
  if (!rows.length) return null;
  const share = { number: true, text: (value) => formatShare(value) };
  const rate = { number: true, text: (value) => (known(value) ? `${formatBytes(value)}/s` : "–") };
  return section("gpus", "Use of the GPUs",
    note("The table: means while it trained, validation included; curves of many samples are running means. Utilisation: some kernel ran. SM active: shares of multiprocessors with work. Tensor active: shares of cycles in which tensor cores computed."),
    element("div", { class: "charts" }, charts.map((chart) => chart.root)),
    table(rows, [
      ["GPU", (row) => row.gpu, { number: true }], ["utilisation", (row) => row.utilisation, share], ["SM active", (row) => row.sm_active, share],
      ["tensor active", (row) => row.tensor_active, share], ["power", (row) => row.power_watts, { number: true, text: (value) => (known(value) ? `${Math.round(value)} W` : "–") }],
      ["PCIe out", (row) => row.pcie_tx_bytes_per_second, rate], ["PCIe in", (row) => row.pcie_rx_bytes_per_second, rate],
      ["most memory", (row) => row.memory_bytes_most, { number: true, text: formatBytes }], ["of", (row) => row.memory_bytes_total, { number: true, text: formatBytes }],
    ]));
}

function memorySection(model) {
  const rows = model.figures.memory;
  if (!rows.length) return null;
  const bytes = { number: true, text: formatBytes };
  const columns = [
    ["role", (row) => row.role], ["rank", (row) => row.rank, { number: true }], ["GPU", (row) => row.gpu, { number: true }],
    ["predicted peak", (row) => row.bytes, bytes], ["measured peak", (row) => row.peak_bytes, bytes],
    ["off by", (row) => row.off, { number: true, text: (value) => (known(value) ? formatGain(value, 1) : "–") }],
    ["most on the GPU", (row) => row.gpu_bytes, bytes], ["most in host memory", (row) => row.host_bytes, bytes],
    ["at", (row) => row.moment],
    ["predicted parts", (row) => Object.entries(row.parts || {}).map(([name, size]) => `${name.replaceAll("_", " ")} ${formatBytes(size)}`).join(", "), { class: "wrap quiet" }],
  ];
  return section("memory", "Memory, predicted and used",
    note("Measured peak: what torch had handed out at most. On the GPU: taken by whomever while the process ran, context and libraries included. In host memory: the whole process."),
    table(rows, columns.filter(([, value]) => rows.some((row) => known(value(row))))));
}

function predictionSection(model) {
  const { prediction } = model.figures;
  const { verdict } = model;
  const found = verdict.predicted_tokens_per_second ?? prediction?.throughput?.tokens_per_second;
  if (!known(found)) return null;
  const tested = known(verdict.prediction_error) ? `, measured ${formatRate(verdict.steady_tokens_per_second)}: the prediction was ${formatGain(verdict.prediction_error)} off.` : ", not tested yet.";
  const stages = Object.keys(prediction.stages || {});
  const costs = verdict.costs || {};
  const value = { number: true };
  return section("prediction", "Throughput, predicted and measured",
    element("p", {}, `Outside validation and checkpoints: predicted ${formatRate(found)} tokens/s${tested}`),
    stages.length ? table(stages, [["stage", (name) => name.replaceAll("_", " ")], ["predicted from", (name) => prediction.stages[name], value], ["measured", (name) => costs[name], value]]) : null);
}

function planSection(model, chart) {
  const { plan } = model.figures;
  if (!plan && !model.fixed.mixing) return null;
  const facts = plan ? [
    ["documents", plan.documents], ["packs", plan.packs], ["epochs", plan.epochs], ["replays", plan.replays], ["token fill", formatShare(plan.token_fill, 1)],
    ["anchor fill", formatShare(plan.anchor_fill, 1)], ["trained tokens", plan.trained_tokens], ["anchors", plan.anchors],
    ["refused: too long", plan.refused?.too_long], ["refused: no anchor", plan.refused?.no_anchor],
    ["mixing, mean", formatNumber(plan.mixing_mean, 3)], ["mixing, worst step", formatNumber(plan.mixing_worst, 3)],
  ] : [];
  return section("mixing", "Data: fill and mixing",
    note("Mixing is how far the lengths of a step's documents are from the corpus': 0 alike, 1 disjoint. Some distance is chance."),
    element("div", { class: "columns" }, chart ? chart.root : null,
      facts.length ? table(facts, [["planned", ([name]) => name], ["", ([, value]) => value, { number: true }]]) : null));
}

function slotSection(model) {
  const last = model.validations[model.validations.length - 1];
  const bars = (values) => {
    const highest = Math.max(0.05, ...values.map((value) => value || 0));
    return [
      element("div", { class: "slots" }, values.map((value) => element("div", { style: `height:${(88 * (value || 0)) / highest}%`, title: formatShare(value, 2) }, element("span", {}, known(value) ? Math.round(100 * value) : "–")))),
      element("div", { class: "slot-names" }, values.map((_, slot) => element("span", {}, String(slot + 1)))),
    ];
  };
  const parts = [];
  if (model.slot_accuracy.length) parts.push(element("div", {}, element("h3", {}, "In training: accuracy, % of supervised slots"), bars(model.slot_accuracy)));
  if (last?.slot_acceptance) parts.push(element("div", {}, element("h3", {}, `Validated at step ${last.step}: % of blocks accepted up to the slot`), bars(last.slot_acceptance)));
  return parts.length ? section("slots", "By slot of the block", element("div", { class: "columns" }, parts)) : null;
}

function validationSection(model) {
  const rows = [...model.validations].reverse();
  if (!rows.length) return null;
  const lengths = rows.map((row) => row.acceptance_length || 0);
  const best = Math.min(...lengths) < Math.max(...lengths) ? Math.max(...lengths) : null;
  const slots = Math.max(0, ...rows.map((row) => row.slot_acceptance?.length || 0));
  const columns = [
    ["step", (row) => row.step, { number: true }],
    ["acceptance length", (row) => row.acceptance_length, { number: true, class: (row) => (row.acceptance_length === best ? "best" : "") }],
    ["by request", (row) => row.acceptance_length_by_request, { number: true }],
    ["answers", (row) => row.answers, { number: true }], ["took", (row) => row.seconds, { number: true, text: formatSeconds }],
  ];
  for (let slot = 0; slot < slots; slot++) {
    columns.push([`slot ${slot + 1}`, (row) => row.slot_acceptance?.[slot], { class: "cell", text: (value) => (known(value) ? formatShare(value) : "") }]);
  }
  return section("validations", "Validations", note("Newest first. A slot's share is of blocks accepted up to it."), table(rows, columns));
}

function eventsSection(model) {
  const rows = model.figures.told;
  if (!rows.length) return null;
  return section("events", "Events", table(rows, [
    ["step", (row) => row.step, { number: true }], ["kind", (row) => row.kind.replaceAll("_", " ")],
    ["what", (row) => Object.entries(row).filter(([name]) => !["kind", "step"].includes(name)).map(([name, value]) => `${name.replaceAll("_", " ")}: ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", "), { class: "wrap" }],
  ]));
}

function recipeSection(model) {
  const { recipe_given: given, recipe_text: resolved } = model.fixed;
  if (!given && !resolved) return null;
  return section("recipe", "Recipe", element("div", { class: "columns" },
    given ? element("div", {}, element("h3", {}, "As given"), element("pre", {}, given)) : null,
    resolved ? element("div", {}, element("h3", {}, "Resolved: every key"), element("pre", {}, resolved)) : null));
}

function environmentSection(model) {
  const { environment, process } = model.fixed;
  const plain = (value) => (Array.isArray(value) ? value.join(" ") : value !== null && typeof value === "object" ? Object.entries(value).map(([name, part]) => `${name} ${plain(part)}`).join(", ") : String(value ?? "–"));
  const told = ([name, value]) => (name.endsWith("_bytes") ? formatBytes(value) : plain(value));
  const facts = [["", ([name]) => name.replace(/_bytes$/, "").replaceAll("_", " ")], ["", told, { class: "wrap" }]];
  const starts = environment.map((start, index) => element("div", {},
    element("h3", {}, environment.length > 1 ? `Start ${index + 1}` : "Start"),
    table(Object.entries(start), facts)));
  if (process) starts.push(element("div", {}, element("h3", {}, "Process"), table(Object.entries(process), facts)));
  return starts.length ? section("environment", "Environment, code and command", element("div", { class: "columns" }, starts.reverse())) : null;
}
