// The page's behaviour: the table is sorted and filtered by DataTables, the figures are drawn by Observable Plot as SVG,
// whose colours are the style sheet's, so that they follow it between light and dark.
"use strict";

const flnoisebench = (() => {
  const index = JSON.parse(document.getElementById("index").textContent);
  const byId = (id) => document.getElementById(id);
  const filters = byId("filters");
  const choices = byId("choices");

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // ------------------------------------------------------------------------------------------------------- data

  const received = {};  // data set -> rows by id, as site.py wrote them, with their columns by name
  const waiting = {};

  function receive(dataset, rows) {
    received[dataset] = new Map(rows.map((row) => [row.id, { ...row, ...named(row.values) }]));
  }

  function named(values) {
    return Object.fromEntries(index.columns.map((column, i) => [column.name, values[i]]));
  }

  /** The rows of a data set.  By a script and not by fetch, which a page that was opened as a file may not use. */
  function load(dataset) {
    waiting[dataset] ??= new Promise((resolve, reject) => {
      const script = make("script", { src: index.data[dataset] });
      script.onload = () => resolve(received[dataset]);
      script.onerror = () => {
        delete waiting[dataset];
        script.remove();
        reject(new Error(`${index.data[dataset]} cannot be loaded; it belongs beside this page`));
      };
      document.head.append(script);
    });
    return waiting[dataset];
  }

  // -------------------------------------------------------------------------------------------------- the table

  // What is missing comes last in both directions.
  const missingLast = (sign) => (a, b) =>
    a === "" || b === "" ? (a === "") - (b === "") : sign * (Number(a) - Number(b));
  DataTable.type("measured", { order: { asc: missingLast(1), desc: missingLast(-1) } });
  DataTable.ext.errMode = "throw";

  const table = new DataTable("#table", {
    order: [],
    autoWidth: false,
    paging: byId("table").tBodies[0].rows.length > 100,
    pageLength: 50,
    layout: { topStart: null, topEnd: null, bottomStart: null, bottomEnd: null, bottom: "paging" },
    columnDefs: [{ targets: ".measured", type: "measured", orderSequence: ["desc", "asc", ""] }],
    language: { zeroRecords: "No row is left: the filters exclude them all." },
  });
  const total = table.rows().count();

  function passes(tr) {
    return [...filters.elements].every((input) => {
      if (input.name === "oracles") return input.checked || !tr.dataset.oracle;
      if (input.name === "doubted") return input.checked || !tr.dataset.flags;
      return input.tagName !== "SELECT" || input.value === "" || tr.dataset[input.name] === input.value;
    });
  }

  function filter() {
    table.search(filters.elements.search.value).draw();
    const left = table.rows({ search: "applied" }).count();
    byId("count").textContent = `${left} of ${total} rows`;
    offerGroups();
    remember();
    draw();
  }

  for (const tr of table.rows().nodes().toArray()) {
    const more = make("button", { type: "button", class: "more", "aria-expanded": "false" }, "details");
    more.addEventListener("click", () => toggle(tr, more));
    tr.cells[0].append(" ", more);
  }
  table.search.fixed("filters", (text, data, row) => passes(table.row(row).node()));
  filters.addEventListener("change", filter);
  filters.elements.search.addEventListener("input", filter);
  filters.addEventListener("reset", () => setTimeout(filter));
  filters.addEventListener("submit", (event) => event.preventDefault());
  choices.addEventListener("submit", (event) => event.preventDefault());

  async function toggle(tr, more) {
    const { child } = table.row(tr);
    if (child.isShown()) {
      child.hide();
      more.setAttribute("aria-expanded", "false");
      return;
    }
    let content;
    try {
      content = facts((await load(tr.dataset.dataset)).get(tr.id));
    } catch (error) {
      content = make("p", { role: "alert" }, error.message);
    }
    child(content).show();
    more.setAttribute("aria-expanded", "true");
  }

  /** All columns of a row, those without a value apart, with what they mean. */
  function facts(row) {
    const list = make("dl", { class: "facts" });
    for (const { name, unit, why } of index.columns) {
      if (row[name] === null || row[name] === "") continue;
      const value = `${row[name]}${unit && typeof row[name] === "number" ? " " + unit : ""}`;
      list.append(make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, why))));
    }
    return list;
  }

  // ------------------------------------------------------------------------------------------------ the figures

  const COLOURS = 8;
  const SYMBOLS = ["circle", "square", "triangle", "diamond", "star", "cross", "wye"];  // 7: 56 pairs with 8 colours
  const hidden = new Set();  // series that the legend switched off

  function colour(series) {
    return `var(--series-${index.series.indexOf(series) % COLOURS})`;
  }

  function symbol(series) {
    return SYMBOLS[index.series.indexOf(series) % SYMBOLS.length];
  }

  const COSTS = {
    seconds: { label: "seconds of a run", of: (row) => row.seconds_per_round === null ? null : row.seconds_per_round * row.rounds },
    bytes: { label: "bytes of a run, up and down", of: (row) => row.bytes_up === null ? null : row.bytes_up + row.bytes_down },
    images: { label: "images trained in a run", of: (row) => row.images_trained },
  };

  function hardware(row) {
    return `${row.device}, ${row.devices} ${row.devices === "1" ? "device" : "devices"}, ${row.executor}, lanes ${row.lanes}`;
  }

  function short(value) {
    return d3.format(Math.abs(value) >= 1000 ? ".3~s" : ".3~r")(value);
  }

  function offer(select, values, labels = values) {
    const before = select.value;
    select.replaceChildren(...values.map((value, i) => make("option", { value }, labels[i])));
    if (values.map(String).includes(before)) select.value = before;
  }

  /** The rows that the filters leave, as DataTables sees them, on all of its pages. */
  function left() {
    return table.rows({ search: "applied" }).nodes().toArray();
  }

  function offerGroups() {
    const groups = [...new Set(left().map((tr) => Number(tr.dataset.group)))].sort((a, b) => a - b);
    const chosen = choices.elements.group.value;
    offer(choices.elements.group, groups, groups.map((group) => index.groups[group].title));
    if (!groups.map(String).includes(chosen)) choices.elements.group.value = fullest(groups) ?? "";
    offerLevels();
  }

  /** The group with the most rows: the one where most can be compared. */
  function fullest(groups) {
    const rows = (group) => d3.sum(left(), (tr) => tr.dataset.group === String(group));
    return d3.greatest(groups, (a, b) => rows(a) - rows(b) || b - a);
  }

  /** Those of the group's levels that the filters leave a row of. */
  function offerLevels() {
    const group = choices.elements.group.value;
    const here = new Set(left().filter((tr) => tr.dataset.group === group).map((tr) => Number(tr.dataset.place)));
    const places = [...here].sort((a, b) => a - b);
    offer(choices.elements.level, places, places.map((place) => index.groups[group].levels[place]));
  }

  let drawing = 0;

  async function draw() {
    const mine = ++drawing;  // what was asked for later wins
    const group = choices.elements.group.value;
    const status = byId("figures-status");
    if (group === "") {
      status.textContent = "No row is left to be drawn.";
      byId("legend").replaceChildren(byId("legend").firstElementChild);
      byId("elsewhere").textContent = "";
      for (const figure of document.querySelectorAll("figure")) clear(figure);
      return;
    }
    let rows;
    try {
      rows = await load(index.groups[group].dataset);
    } catch (error) {
      if (mine === drawing) status.textContent = error.message;
      return;
    }
    if (mine !== drawing) return;
    const drawn = left().filter((tr) => tr.dataset.group === group).map((tr) => rows.get(tr.id));
    legend(drawn);
    const shown = drawn.filter((row) => !hidden.has(row.series) && row.accuracy_mean !== null);
    const here = shown.filter((row) => String(row.level) === choices.elements.level.value);
    status.textContent = shown.length ? onOtherDraws(here) : "No row with a result is left to be drawn.";
    drawCost(here);
    drawRobustness(shown);
    drawLearning(here);
  }

  /** What to know of rows that are means over different draws, of which one can be far harder than the next. */
  function onOtherDraws(rows) {
    if (new Set(rows.map((row) => row.draws)).size < 2) return "";
    const said = rows.map((row) => `${row.series} (${row.draws})`).join("; ");
    return `Not all on the same draws, so compare with care: ${said}.`;
  }

  function legend(rows) {
    const box = byId("legend");
    const oracles = new Set(rows.filter((row) => row.oracle).map((row) => row.series));
    const names = [...new Set(rows.map((row) => row.series))].sort((a, b) => oracles.has(a) - oracles.has(b));
    const same = [...box.querySelectorAll("input")].map((input) => input.value);
    if (JSON.stringify(same) === JSON.stringify(names)) return;  // keeps the keyboard's focus
    box.replaceChildren(box.firstElementChild, ...names.map((name) => {
      const input = make("input", { type: "checkbox", value: name });
      input.checked = !hidden.has(name);
      input.addEventListener("change", () => {
        if (input.checked) hidden.delete(name);
        else hidden.add(name);
        draw();
      });
      return make("label", {}, input, swatch(name, oracles.has(name)), name);
    }));
  }

  function swatch(name, oracle) {
    const svg = d3.create("svg").attr("width", 34).attr("height", 16).attr("viewBox", "-17 -8 34 16");
    svg.attr("aria-hidden", "true").style("color", colour(name));
    svg.append("path").attr("d", "M-16,0H16").attr("stroke", "currentColor").attr("stroke-width", 2)
      .attr("stroke-dasharray", oracle ? "5 4" : null);
    svg.append("path").attr("d", d3.symbol(SHAPES[symbol(name)], 60)()).attr("fill", "currentColor");
    return svg.node();
  }

  const SHAPES = {
    circle: d3.symbolCircle, square: d3.symbolSquare, triangle: d3.symbolTriangle, diamond: d3.symbolDiamond,
    star: d3.symbolStar, cross: d3.symbolCross, wye: d3.symbolWye,
  };

  function clear(figure) {
    figure.querySelector(".plot").replaceChildren();
    figure.querySelector("details .scroll").replaceChildren();
  }

  /** Draw marks into a figure and the numbers behind them into its table.  columns: [heading, point -> text]. */
  function show(id, points, columns, { marks, x, y, label }) {
    const figure = byId(id);
    clear(figure);
    const place = figure.querySelector(".plot");
    if (!points.length) {
      place.append(make("p", { class: "note" }, "Nothing to draw here."));
      return;
    }
    const names = [...new Set(points.map((point) => point.series))];
    const plot = Plot.plot({
      ariaLabel: label,
      width: Math.max(280, place.clientWidth),
      height: 340,
      marginLeft: 48,
      marginBottom: 40,
      inset: 8,
      style: { fontSize: "12px" },
      x: { grid: true, ...x },
      y: { grid: true, nice: true, ...y },
      color: { type: "ordinal", domain: names, range: names.map(colour) },
      symbol: { domain: names, range: names.map(symbol) },
      marks,
    });
    plot.setAttribute("role", "img");  // one picture with a name; its numbers are in the table below
    place.append(plot);
    const head = make("thead", {}, make("tr", {}, ...columns.map(([name]) => make("th", { scope: "col" }, name))));
    const body = make("tbody");
    for (const point of points.filter((one) => one.listed !== false)) {
      body.append(make("tr", {}, ...columns.map(([, text]) => make("td", {}, String(text(point) ?? "-")))));
    }
    figure.querySelector("details .scroll").append(make("table", {}, head, body));
  }

  const MARK = { r: 5, strokeWidth: 1.75 };

  /** The series' symbols: full for several runs, open for one. */
  function symbols(points, y) {
    const base = { x: "x", y, symbol: "series", stroke: "series", ...MARK };
    return [
      Plot.dot(points.filter((point) => point.n > 1), { ...base, fill: "series", ariaDescription: "several runs" }),
      Plot.dot(points.filter((point) => point.n === 1), { ...base, fill: "var(--background)", ariaDescription: "one run" }),
    ];
  }

  /** Marks of points at (x, accuracy), with bars of a deviation. */
  function dots(points, title) {
    return [
      Plot.ruleX(points.filter((point) => point.spread !== null), {
        x: "x", y1: (point) => point.accuracy - point.spread, y2: (point) => point.accuracy + point.spread, stroke: "series",
      }),
      ...symbols(points, "accuracy"),
      Plot.tip(points, Plot.pointer({ x: "x", y: "accuracy", title })),
    ];
  }

  function lines(points, y) {
    const base = { x: "x", y, z: "series", stroke: "series", strokeWidth: 1.75 };
    return [
      Plot.line(points.filter((point) => !point.oracle), { ...base, ariaDescription: "methods" }),
      Plot.line(points.filter((point) => point.oracle), { ...base, strokeDasharray: "6 4", ariaDescription: "oracles" }),
    ];
  }

  function point(row, x) {
    const draws = `${row.draws.includes(" ") ? "draws" : "draw"} ${row.draws}`;
    const marks = [row.oracle ? "oracle" : "", `n = ${row.n}`, draws, ...row.doubts].filter(Boolean);
    return {
      x, series: row.series, accuracy: row.accuracy_mean, spread: row.accuracy_std_seeds, n: row.n, oracle: row.oracle,
      level: index.groups[row.group].levels[row.level], about: marks.join(", "),
    };
  }

  function accuracyText(one) {
    return one.accuracy.toFixed(2) + (one.spread === null ? "" : ` ± ${one.spread.toFixed(2)}`);
  }

  function drawCost(rows) {
    const kind = choices.elements.cost.value;
    const { label, of } = COSTS[kind];
    const machines = d3.groupSort(rows, (same) => -same.length, hardware);  // the one with the most rows first
    offer(choices.elements.hardware, machines);
    byId("machine").hidden = kind !== "seconds" || machines.length < 2;
    const comparable = kind === "seconds" ? rows.filter((row) => hardware(row) === choices.elements.hardware.value) : rows;
    const points = comparable.map((row) => point(row, of(row))).filter((one) => one.x !== null);
    const elsewhere = rows.filter((row) => !comparable.includes(row)).map((row) => row.series);
    byId("elsewhere").textContent = elsewhere.length ? `Ran on another machine: ${elsewhere.join("; ")}.` : "";
    const costs = points.map((one) => one.x);
    const wide = costs.every((cost) => cost > 0) && Math.max(...costs) > 10 * Math.min(...costs);
    const leading = (value) => [1, 2, 5].includes(Number(value.toExponential()[0]));
    show("cost", points, [
      ["method", (one) => one.series], [label, (one) => short(one.x)], ["accuracy, %", accuracyText], ["marks", (one) => one.about],
    ], {
      label: `Accuracy against ${label}, a point a method`,
      x: {
        label, ...(wide
          ? { type: "log", tickFormat: (value) => (leading(value) ? short(value) : "") }
          : { zero: true, nice: true, ticks: 5, tickFormat: short }),
      },
      y: { label: "accuracy, %" },
      marks: dots(points, (one) => `${one.series}\n${accuracyText(one)} %\n${short(one.x)} ${label}\n${one.about}`),
    });
  }

  function drawRobustness(rows) {
    const points = rows.map((row) => point(row, row.label_noise_before)).filter((one) => one.x !== null);
    points.sort((a, b) => d3.ascending(a.series, b.series) || a.x - b.x);
    const [low, high] = d3.extent(points, (one) => one.x);  // of one level the draws differ by hundredths of a point
    const domain = high - low < 2 ? { domain: [(low + high) / 2 - 1, (low + high) / 2 + 1] } : {};
    show("robustness", points, [
      ["method", (one) => one.series], ["level", (one) => one.level], ["wrong labels, %", (one) => one.x.toFixed(1)],
      ["accuracy, %", accuracyText], ["marks", (one) => one.about],
    ], {
      label: "Accuracy over the share of wrong labels, a line a method",
      x: { label: "wrong labels in the scenario, %", nice: true, ...domain },
      y: { label: "accuracy, %" },
      marks: [
        ...lines(points, "accuracy"),
        ...dots(points, (one) => `${one.series}\n${one.level}: ${one.x.toFixed(1)} % wrong\n${accuracyText(one)} %\n${one.about}`),
      ],
    });
  }

  function drawLearning(rows) {
    const over = choices.elements.over.value;
    const of = choices.elements.of.value;
    const names = { round: "rounds", seconds: "seconds", images: "images trained" };
    const what = of === "accuracy" ? "accuracy, %" : "wrong labels trained on, %";
    const points = rows.filter((row) => row.curves).flatMap((row) =>
      row.curves.round.map((round, i) => ({
        ...point(row, row.curves[over][i]), y: row.curves[of][i], round, listed: i === row.curves.round.length - 1,
        deviation: of === "accuracy" ? row.curves.accuracy_std[i] : null,
      })).filter((one) => one.y !== null && one.x !== null));
    const banded = points.filter((one) => one.deviation !== null);
    show("learning", points, [
      ["method", (one) => one.series], ["last round", (one) => one.round], [names[over], (one) => short(one.x)],
      [what, (one) => one.y.toFixed(2)], ["marks", (one) => one.about],
    ], {
      label: `Learning curves: ${what} over ${names[over]}, a line a method`,
      x: { label: names[over], ticks: 5, tickFormat: short },
      y: { label: what },
      marks: [
        Plot.areaY(banded, {
          x: "x", y1: (one) => one.y - one.deviation, y2: (one) => one.y + one.deviation, z: "series", fill: "series", fillOpacity: 0.15,
        }),
        ...lines(points, "y"),
        ...symbols(points.filter((one) => one.listed), "y"),  // at the ends: more than 8 methods share colours
        Plot.tip(points, Plot.pointer({
          x: "x", y: "y", title: (one) => `${one.series}\nround ${one.round}\n${one.y.toFixed(2)} %\n${one.about}`,
        })),
      ],
    });
  }

  choices.addEventListener("change", (event) => {
    if (event.target.name === "group") offerLevels();
    draw();
  });

  // -------------------------------------------------------------------- filters in the address, width, the start

  /** The filters that are set, behind the #, so that a view can be sent to somebody. */
  function remember() {
    const said = new URLSearchParams();
    for (const input of filters.elements) {
      if (input.type === "checkbox" ? !input.checked : input.name && input.value) {
        said.set(input.name, input.type === "checkbox" ? "no" : input.value);
      }
    }
    const hash = said.size ? `#?${said}` : "";
    if (location.hash !== hash && (hash || location.hash.startsWith("#?"))) {
      history.replaceState(null, "", hash || location.pathname + location.search);
    }
  }

  function recall() {
    if (!location.hash.startsWith("#?")) return;
    for (const [name, value] of new URLSearchParams(location.hash.slice(2))) {
      const input = filters.elements[name];
      if (!input) continue;
      if (input.type === "checkbox") input.checked = value !== "no";
      else if (input.tagName !== "SELECT" || [...input.options].some((option) => option.value === value)) input.value = value;
    }
  }

  function start() {
    byId("figures").hidden = false;
    recall();
    filter();
    addEventListener("hashchange", () => {  // another view's address, pasted where this page is open: no visit anew
      if (!location.hash.startsWith("#?")) return;
      filters.reset();  // which filters the table in a moment, by what is recalled
      recall();
    });
    let width = document.documentElement.clientWidth;
    addEventListener("resize", () => {
      if (document.documentElement.clientWidth === width) return;
      width = document.documentElement.clientWidth;
      draw();
    });
  }

  return { receive, start };
})();

flnoisebench.start();
