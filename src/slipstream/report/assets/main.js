// Puts the page together, and on a live page asks for what is newer.

const ASK_MILLISECONDS = 1000;
let page = null;

class Page {
  constructor(models, { live, states }) {
    this.models = models;
    this.live = live;
    this.states = states;
    this.drawn = new Map(); // what a section was drawn from, so that an unchanged one is left alone
    this.show(models[0]);
  }

  // Builds everything for one run; in compare mode another one can be chosen.
  show(model) {
    this.model = model;
    this.drawn.clear();
    const models = () => this.models;
    const own = () => this.model;
    this.lanes = new LaneView(model);
    listenToKeys(this.lanes);
    listenToPointer(this.lanes);
    if (this.live && !model.ended) this.lanes.follow = 60e6;
    else showTraining(this.lanes);
    this.trainCharts = trainCharts(models);
    this.queueCharts = [
      sampleChart(() => own().queues, "Packs ready", { ready: "" }, { who: (rank) => `rank ${rank}` }),
      sampleChart(() => own().queues, "Bytes ready", { ready_bytes: "" }, { who: (rank) => `rank ${rank}`, text: formatBytes }),
    ];
    const gpu = (key) => `GPU ${key}`;
    this.gpuCharts = [
      sampleChart(() => own().gpus, "Utilisation", { utilisation: "" }, { who: gpu, text: formatShare, mean: true }),
      sampleChart(() => own().gpus, "SM active", { sm_active: "" }, { who: gpu, text: formatShare, mean: true }),
      sampleChart(() => own().gpus, "Tensor active", { tensor_active: "" }, { who: gpu, text: formatShare, mean: true }),
      sampleChart(() => own().gpus, "Memory in use", { memory_bytes: "" }, { who: gpu, text: formatBytes }),
      sampleChart(() => own().gpus, "Power", { power_watts: "" }, { who: gpu, mean: true, text: (value) => `${Math.round(value)} W` }),
      sampleChart(() => own().gpus, "PCIe out per second", { pcie_tx_bytes_per_second: "" }, { who: gpu, mean: true, text: formatBytes }),
      sampleChart(() => own().gpus, "PCIe in per second", { pcie_rx_bytes_per_second: "" }, { who: gpu, mean: true, text: formatBytes }),
    ];
    this.mixingChart = model.mixing ? new Chart("Distance of a step's lengths to the corpus'", () => ({
      x: model.mixing.step, series: [{ label: "distance", values: model.mixing.distance }],
    })) : null;
    document.getElementById("main").replaceChildren();
    this.update();
    this.drawContents();
  }

  // Sections in order: [id, what it depends on, how it is made].
  parts() {
    const { model } = this;
    const { figures } = model;
    const timeKey = [figures.workers, darkScheme.matches];
    return [
      ["compare", this.models.length > 1 ? [this.models.map((one) => one.figures.step), darkScheme.matches] : null, () => compareSection(this.models)],
      ["verdict", [model.verdict, figures.cause], () => verdictSection(model, this.live)],
      ["key-figures", [figures.rates, figures.results, figures.workers, model.verdict.tokens_per_second], () => keyFigures(model)],
      ["lanes", model.lanes.length > 0, () => this.lanesSection()],
      ["curves", "once", () => section("curves", "Curves", element("div", { class: "charts" }, this.trainCharts.map((chart) => chart.root)))],
      ["slots", [model.slot_accuracy, model.validations.length], () => slotSection(model)],
      ["time", timeKey, () => timeSection(model)],
      ["stages", figures.stages, () => stagesSection(model)],
      ["queues", figures.queues, () => queuesSection(model, this.queueCharts)],
      ["gpus", figures.gpus, () => gpusSection(model, this.gpuCharts)],
      ["memory", figures.memory, () => memorySection(model)],
      ["prediction", [figures.prediction, figures.rates, model.verdict.tokens_per_second], () => predictionSection(model)],
      ["validations", model.validations, () => validationSection(model)],
      ["mixing", "once", () => planSection(model, this.mixingChart)],
      ["events", figures.told, () => eventsSection(model)],
      ["recipe", "once", () => recipeSection(model)],
      ["environment", "once", () => environmentSection(model)],
    ];
  }

  lanesSection() {
    if (!this.model.lanes.length) return section("lanes", "Lanes over time", note("No spans were recorded."));
    const exact = this.model.exact ? note("There are more spans than a page holds: single ones are kept in the stretches marked under the lanes; elsewhere, a state's spans are merged.") : null;
    return section("lanes", "Lanes over time", laneToolbar(this.lanes, { live: this.live }), this.lanes.stage, this.lanes.legend, this.lanes.status, exact);
  }

  update() {
    const main = document.getElementById("main");
    drawHeader(this.model, this.live);
    let before = null;
    for (const [id, depends, make] of this.parts()) {
      const key = JSON.stringify(depends);
      const there = document.getElementById(id);
      if (depends !== null && (this.drawn.get(id) !== key || !this.drawn.has(id))) {
        const open = there ? [...there.querySelectorAll("details")].map((one) => one.open) : [];
        const made = make();
        this.drawn.set(id, key);
        there?.remove();
        if (made) {
          if (before) before.after(made);
          else main.prepend(made);
          made.querySelectorAll("details").forEach((one, index) => { one.open = open[index] || false; });
        }
      }
      before = document.getElementById(id) || before;
    }
    this.lanes.dataChanged(false);
    for (const chart of this.charts()) chart.draw();
  }

  charts() {
    return [...this.trainCharts, ...this.queueCharts, ...this.gpuCharts, this.mixingChart].filter(Boolean);
  }

  drawContents() {
    const links = [...document.querySelectorAll("main > section[data-title]")].filter((one) => one.querySelector("h2"));
    const short = { "Lanes over time": "Lanes", "Where the time went": "Time", "Stages of a step": "Stages", "Queues of hidden states": "Queues", "Use of the GPUs": "GPUs", "Memory, predicted and used": "Memory", "Environment, code and command": "Environment" };
    const kept = ["compare", "lanes", "curves", "time", "stages", "queues", "gpus", "memory", "validations", "recipe", "environment"];
    document.getElementById("contents").replaceChildren(...links.filter((one) => kept.includes(one.id)).map((one) =>
      element("a", { href: `#${one.id}` }, short[one.dataset.title] || one.dataset.title)));
    if (this.models.length < 2) return;
    const choose = element("select", { "aria-label": "run to show" }, this.models.map((model, index) => element("option", { value: String(index), selected: model === this.model }, model.label)));
    choose.addEventListener("change", () => this.show(this.models[Number(choose.value)]));
    document.getElementById("run-name").hidden = true;
    document.getElementById("choose-run").replaceChildren(choose);
  }
}

async function takeWhole(model, payload) {
  await model.take(payload);
  if (payload.whole) {
    const { mixing } = payload;
    model.mixing = mixing && { step: Array.from(await decodeColumn(mixing.step)), distance: withGaps(await decodeColumn(mixing.distance)) };
  }
}

async function askAgain() {
  const { model } = page;
  try {
    if (!document.hidden) {
      const answer = await fetch(`data?since=${encodeURIComponent(model.cursor)}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      const { runs: [payload] } = await answer.json();
      await takeWhole(model, payload);
      if (payload.whole) page.show(model);
      else page.update();
      document.getElementById("footer").textContent = page.words;
    }
  } catch (error) {
    document.getElementById("footer").textContent = `No answer from slipstream watch (${error.message}); what is shown is the last that came.`;
  }
  setTimeout(askAgain, ASK_MILLISECONDS);
}

async function begin() {
  let payload = JSON.parse(document.getElementById("payload").textContent);
  const { live } = payload;
  if (live) payload = { ...payload, ...(await (await fetch("data", { cache: "no-store" })).json()) };
  const models = [];
  for (const run of payload.runs) {
    const model = new RunModel(structuredClone(payload.states));
    await takeWhole(model, run);
    models.push(model);
  }
  labelRuns(models);
  page = new Page(models, { live, states: payload.states });
  page.words = payload.words;
  document.getElementById("footer").textContent = payload.words;
  document.body.dataset.ready = "yes";
  if (live) setTimeout(askAgain, ASK_MILLISECONDS);
}

begin();
