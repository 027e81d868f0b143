// Draws the panels of the Grafana board from its file and the answers of Prometheus: places, titles, units, limits,
// thresholds and legends are those of the file. It is no Grafana: what it does not know of a panel is an error.
"use strict";

const CbdBoard = (() => {
  // Of a line of the grid with its margin, as in Grafana; the width of the window is 24 columns.
  const [LINE, MARGIN, COLUMNS] = [38, 8, 24];
  const LEGEND = 62;
  const LINES = ["#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#ffa6b0"];
  const STATES = { green: "#73bf69", orange: "#ff9830", red: "#f2495c", text: "#d8dce0" };
  const { bytes, rate, count, share, nanoseconds, seconds } = CbdPlots;
  const short = (value) => count(Number(value.toPrecision(3)));
  const UNITS = {
    bytes, binBps: rate, percentunit: share, none: short,
    s: (value) => (value !== 0 && Math.abs(value) < 1 ? nanoseconds(value * 1e9) : seconds(value)),
    reqps: (value) => `${short(value)} req/s`, iops: (value) => `${short(value)} io/s`,
    ops: (value) => `${short(value)} ops/s`,
  };

  function known(table, name) {
    if (!(name in table)) {
      throw new Error(`the drawing knows no ${name}`);
    }
    return table[name];
  }

  function made(kind, text, below) {
    const node = document.createElement(kind);
    node.textContent = text;
    below.append(node);
    return node;
  }

  // The last value of the only series, with the colour of its threshold.
  function drawStat(box, { fieldConfig }, series) {
    const { unit, noValue, thresholds } = fieldConfig.defaults;
    const value = series[0]?.points.at(-1)?.[1];
    const text = made("p", value === undefined ? noValue : known(UNITS, unit ?? "none")(value), box);
    const reached = thresholds.steps.filter((step) => step.value === null || (value ?? 0) >= step.value);
    text.style.color = known(STATES, reached.at(-1).color);
  }

  function drawLines(box, { fieldConfig, options }, series, [from, to]) {
    const { unit, min, max, custom } = fieldConfig.defaults;
    const format = known(UNITS, unit ?? "none");
    const times = [...new Set(series.flatMap(({ points }) => points.map(([time]) => time)))].sort((a, b) => a - b);
    const columns = series.map(({ points }) => {
      const values = new Map(points);
      return times.map((time) => values.get(time) ?? null);
    });
    const axis = (more) => ({ stroke: "#9aa5b1", grid: { stroke: "#2a3036", width: 1 }, ticks: { show: false }, ...more });
    const values = (_, splits) => splits.map(format);
    const incrs = ["bytes", "binBps"].includes(unit) ? Array.from({ length: 50 }, (_, power) => 2 ** power) : undefined;
    const fill = Math.round(custom.fillOpacity * 2.55).toString(16).padStart(2, "0");
    new uPlot({
      width: box.clientWidth - 16, height: box.clientHeight - 30 - LEGEND, legend: { show: false }, cursor: { show: false },
      padding: [8, 4, 0, 0],
      scales: { x: { range: [from, to] },
        y: { range: (_, low, high) => [min ?? low, max ?? (high > 0 ? high * 1.05 : 1)] } },
      axes: [axis({ values: [[1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]], space: 90, size: 28 }),
        axis({ values, size: 72, ...(incrs && { incrs }) })],
      series: [{}, ...series.map((_, at) => ({ stroke: LINES[at % LINES.length], width: custom.lineWidth,
        fill: LINES[at % LINES.length] + fill, points: { show: false }, spanGaps: custom.spanNulls }))],
    }, [times, ...columns], box);
    if (options.legend.showLegend) {
      const list = made("ul", "", box);
      series.forEach(({ legend }, at) => made("li", legend, list).style.setProperty("--line", LINES[at % LINES.length]));
    }
  }

  const KINDS = { row: () => {}, stat: drawStat, timeseries: drawLines };

  // `results` has the series of each panel that has queries, by its number; `span` the times of the plots in seconds.
  function draw(board, results, span, note) {
    document.querySelector("h1").textContent = board.title;
    const variables = board.templating.list.filter(({ type }) => type === "query");
    variables.forEach(({ label, current }) => {
      document.getElementById("made").before(made("span", `${label}: ${current.text.join(", ")}`, document.body));
    });
    document.getElementById("made").textContent = note;
    const below = document.getElementById("board");
    const column = (below.clientWidth + MARGIN) / COLUMNS;
    for (const panel of board.panels) {
      const { x, y, w, h } = panel.gridPos;
      const box = made("section", "", below);
      box.className = `panel ${panel.type}`;
      box.id = `panel-${panel.id}`;
      Object.assign(box.style, { left: `${x * column}px`, top: `${y * LINE}px`, width: `${w * column - MARGIN}px`,
        height: `${h * LINE - MARGIN}px` });
      made("h2", panel.title, box);
      known(KINDS, panel.type)(box, panel, results[panel.id], span);
    }
    const lines = Math.max(...board.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
    below.style.height = `${lines * LINE}px`;
    return document.body.scrollHeight;
  }

  return { draw };
})();
