// Several runs beside one another: what differs in their recipes, and what came of it.

const isTable = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function flatten(recipe, prefix = "") {
  return Object.entries(recipe || {}).flatMap(([key, value]) => (isTable(value) ? flatten(value, `${prefix}${key}.`) : [[`${prefix}${key}`, JSON.stringify(value)]]));
}

function recipeDifferences(models) {
  const recipes = models.map((model) => new Map(flatten(model.fixed.recipe)));
  const keys = [...new Set(recipes.flatMap((recipe) => [...recipe.keys()]))];
  return keys.filter((key) => !["name", "runs"].includes(key)).filter((key) => new Set(recipes.map((recipe) => recipe.get(key))).size > 1).map((key) => [key, recipes.map((recipe) => recipe.get(key) ?? "–")]);
}

// [name, value of a model, how it is written, which end is better: 1 high, -1 low, 0 neither]
const RESULTS = [
  ["status", (model) => model.figures.status, String, 0],
  ["steps", (model) => model.figures.step, formatNumber, 0],
  ["time", (model) => model.figures.seconds, formatClock, 0],
  ["acceptance length, last validation", (model) => model.figures.results.validation?.last.acceptance_length, formatNumber, 1],
  ["acceptance length, best validation", (model) => model.figures.results.validation?.best.acceptance_length, formatNumber, 1],
  ["acceptance length, training", (model) => model.figures.results.acceptance_length, formatNumber, 1],
  ["loss", (model) => model.figures.results.loss, formatNumber, -1],
  ["accuracy", (model) => model.figures.results.accuracy, (value) => formatShare(value, 1), 1],
  ["context tokens/s", (model) => model.verdict.tokens_per_second ?? model.figures.rates.context_tokens_per_second, formatRate, 1],
  ["anchors/s", (model) => model.figures.rates.anchors_per_second, formatRate, 1],
  ["seconds per step", (model) => model.figures.rates.seconds_per_step, formatSeconds, -1],
  ["context tokens trained", (model) => model.figures.results.context_tokens, formatRate, 0],
  ["skipped steps", (model) => model.figures.results.skipped_steps, formatNumber, -1],
  ["rows not finite", (model) => model.figures.results.bad_rows, formatNumber, -1],
  ["packs that came damaged", (model) => model.figures.results.rejected_seals, formatNumber, -1],
  ["verdict", (model) => model.verdict.headline, String, 0],
];

function compareSection(models) {
  const heads = models.map((model, index) => element("span", {}, element("i", { class: "swatch", style: `background:${seriesColour(index)}` }), ` ${model.label}`));
  const titled = (rows, value, classOf) => [
    ["", (row) => row[0]],
    ...heads.map((head, index) => [head.cloneNode(true), (row) => value(row, index), { class: (row) => classOf(row, index) }]),
  ];
  const results = RESULTS.map(([name, value, text, better]) => {
    const values = models.map(value);
    const present = values.filter(known);
    const best = better && new Set(present).size > 1 ? (better > 0 ? Math.max(...present) : Math.min(...present)) : null;
    return [name, values.map((one) => (known(one) ? text(one) : "–")), values.map((one) => best !== null && one === best)];
  });
  const differences = recipeDifferences(models);
  return section("compare", `${models.length} runs`,
    element("h3", {}, "Results"), table(results, titled(results, (row, index) => row[1][index], (row, index) => (row[0] === "verdict" ? "wrap" : row[2][index] ? "best" : ""))),
    element("h3", { style: "margin-top:14px" }, "What differs in their recipes"),
    differences.length ? table(differences, titled(differences, (row, index) => row[1][index], () => "wrap")) : note("Nothing but their names and folders."));
}

// Runs of one name are told apart by their folder.
function labelRuns(models) {
  for (const model of models) {
    const same = models.filter((other) => other.figures.name === model.figures.name);
    model.label = same.length > 1 ? `${model.figures.name} (${model.figures.folder})` : model.figures.name;
  }
}
