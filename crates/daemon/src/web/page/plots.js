// The plots of the page: what is drawn of a history's columns, and with which colours.
//
// Invariants: colours come from the style sheet, so plots follow the colour scheme. A point that was not sampled is a
// gap, never 0. A plot has its size before it has data.
"use strict";

const CbdPlots = (() => {
  const HEIGHT = 180;
  const powersOfTwo = Array.from({ length: 56 }, (_, power) => 2 ** power);

  function scaled(value, step, units) {
    let at = 0;
    while (Math.abs(value) >= step && at + 1 < units.length) {
      value /= step;
      at += 1;
    }
    const digits = value === 0 || Math.abs(value) >= 100 || (at === 0 && Number.isInteger(value)) ? 0 : 1;
    return `${value.toFixed(digits)} ${units[at]}`.trim();
  }
  const known = (format) => (value) => (value === null || value === undefined ? "–" : format(value));
  const bytes = known((value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]));
  const rate = known((value) => `${bytes(value)}/s`);
  const count = known((value) => scaled(value, 1000, ["", "k", "M", "G"]));
  const share = known((value) => `${(value * 100).toFixed(1)} %`);
  const nanoseconds = known((value) => scaled(value, 1000, ["ns", "µs", "ms", "s"]));
  const seconds = known((value) => {
    if (value < 120) {
      return `${value < 10 && !Number.isInteger(value) ? value.toFixed(1) : Math.round(value)} s`;
    }
    const minutes = Math.floor(value / 60);
    if (minutes < 120) {
      return `${minutes} min`;
    }
    const hours = Math.floor(minutes / 60);
    return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  });

  // Functions of a point: they get a function that returns the value of a column.
  const plain = (name) => (get) => get(name);
  // What a history does not have: the line of the present value.
  const present = (name) => (_, store) => store.present?.[name] ?? null;
  const perSecond = (name) => (get) => {
    const [value, span] = [get(name), get("span_ms")];
    return value === null || !span ? null : (value * 1000) / span;
  };
  const inSeconds = (name) => (get) => (get(name) === null ? null : get(name) / 1000);
  const hitRatio = (get) => (get("read_bytes") && get("read_hit_bytes") !== null
    ? get("read_hit_bytes") / get("read_bytes") : null);
  const percentiles = [
    ["read p50", plain("read_p50_ns"), 3], ["read p99", plain("read_p99_ns"), 1],
    ["read p99.9", plain("read_p999_ns"), 5], ["write p50", plain("write_p50_ns"), 4],
    ["write p99", plain("write_p99_ns"), 2], ["write p99.9", plain("write_p999_ns"), 6],
  ];

  const PLOTS = [
    { id: "throughput", title: "Throughput", format: rate, binary: true,
      series: [["read", perSecond("read_bytes"), 1], ["written", perSecond("written_bytes"), 2]] },
    { id: "requests", title: "Requests a second", format: count,
      series: [["reads", perSecond("reads"), 1], ["writes", perSecond("writes"), 2]] },
    { id: "latency", title: "Latency of requests", format: nanoseconds, log: true, series: percentiles },
    { id: "hit-ratio", title: "Hit ratio: bytes read from the cache", format: share, most: 1,
      series: [["hit ratio", hitRatio, 1]] },
    { id: "dirty", title: "Dirty data and its present target", format: bytes, binary: true,
      series: [["dirty", plain("dirty_bytes"), 2], ["target now", present("target_bytes"), 1]] },
    { id: "recovery-point", title: "Age of the recovery point", format: seconds,
      series: [["age", inSeconds("recovery_point_age_ms"), 2]] },
    { id: "writeback", title: "Writeback", format: rate, binary: true,
      series: [["written back", perSecond("written_back_bytes"), 2]] },
    { id: "disk", title: "Disk", format: rate, binary: true,
      series: [["read", perSecond("disk_read_bytes"), 1], ["written", perSecond("disk_written_bytes"), 2]] },
  ];

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // The data of uPlot for a plot: times in seconds, then a column for each series.
  function dataOf(plot, store) {
    const data = [[], ...plot.series.map(() => [])];
    let last = null;
    store.ticks.forEach((tick, at) => {
      const time = store.originS + tick * store.stepS;
      // A single second without a sample is no gap: the next point has what happened in both.
      if (last !== null && tick - last > 2) {
        data[0].push(time - store.stepS);
        data.slice(1).forEach((column) => column.push(null));
      }
      last = tick;
      data[0].push(time);
      const get = (name) => store.columns[name]?.[at] ?? null;
      plot.series.forEach(([, value], index) => data[index + 1].push(value(get, store)));
    });
    return data;
  }

  function rangeOf(plot) {
    if (plot.log) {
      return (_, min, max) => {
        if (!(min > 0) || !(max > 0)) {
          return [1e3, 1e6];
        }
        const low = Math.floor(Math.log10(min));
        return [10 ** low, 10 ** Math.max(Math.ceil(Math.log10(max)), low + 1)];
      };
    }
    return (_, min, max) => [0, plot.most ?? (max > 0 ? max * 1.1 : 1)];
  }

  const clock = (time) => new Date(time * 1000).toLocaleString();
  // Texts of the time axis by the distance of its ticks in seconds; the date is below the first and at a new day.
  const ofDay = (seconds, text) => [seconds, text, "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1];
  const TIMES = [
    [86400, "{MM}-{DD}", "\n{YYYY}", null, null, null, null, null, 1],
    ofDay(60, "{HH}:{mm}"),
    ofDay(1, "{HH}:{mm}:{ss}"),
  ];

  function optionsOf(plot, width) {
    const axis = (more) => ({
      stroke: colour("faint"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 },
      ...more,
    });
    const short = (value) => plot.format(value).replace(/\.0(?= |$)/, "");
    const values = (_, splits) => splits.map((split) => (split === null ? "" : short(split)));
    const vertical = axis({ size: 74, values });
    if (plot.binary) {
      vertical.incrs = powersOfTwo;
    }
    if (plot.log) {
      const isPower = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9;
      const filter = (_, splits) => splits.map((split) => (isPower(split) ? split : null));
      Object.assign(vertical, { filter, grid: { ...vertical.grid, filter }, ticks: { ...vertical.ticks, filter } });
    }
    const line = ([label, , number]) => ({
      label, stroke: colour(`c${number}`), width: 1.5, points: { size: 4 },
      value: (_, value) => plot.format(value),
    });
    return {
      width, height: HEIGHT, padding: [8, 8, 0, 0],
      cursor: { drag: { x: false, y: false }, sync: { key: "cbd" } },
      scales: {
        x: { time: true, range: (_, min, max) => (min === null ? [0, 60] : [Math.min(min, max - 60), max]) },
        y: { distr: plot.log ? 3 : 1, range: rangeOf(plot) },
      },
      axes: [axis({ values: TIMES, space: 88 }), vertical],
      series: [{ label: "time", value: (_, value) => known(clock)(value) }, ...plot.series.map(line)],
    };
  }

  // Plots can be read by keyboard: arrows move the cursor of all plots, and names of lines are switches.
  function withKeys(figure, chart) {
    figure.onkeydown = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || event.target !== figure) {
        return;
      }
      const last = chart.data[0].length - 1;
      const at = Math.min(Math.max((chart.cursor.idx ?? last + 1) + step, 0), Math.max(last, 0));
      if (last >= 0) {
        chart.setCursor({ left: chart.valToPos(chart.data[0][at], "x"), top: 10 });
      }
      event.preventDefault();
    };
    for (const name of chart.root.querySelectorAll(".u-legend .u-series:not(:first-child) th")) {
      name.tabIndex = 0;
      name.setAttribute("role", "button");
      name.onkeydown = (event) => {
        if (event.key === "Enter" || event.key === " ") {
          name.click();
          event.preventDefault();
        }
      };
    }
  }

  // Draws all plots below an element; returns what changes them.
  function create(below) {
    const charts = PLOTS.map((plot) => {
      const figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      const host = document.createElement("div");
      figure.id = `plot-${plot.id}`;
      figure.tabIndex = 0;
      caption.textContent = plot.title;
      host.className = plot.log ? "host tall" : "host";
      figure.append(caption, host);
      below.append(figure);
      return { plot, figure, host, chart: null };
    });
    let store = { ticks: [], columns: {}, originS: 0, stepS: 1 };
    const build = () => {
      for (const entry of charts) {
        entry.chart?.destroy();
        const width = Math.max(entry.host.clientWidth, 100);
        entry.chart = new uPlot(optionsOf(entry.plot, width), dataOf(entry.plot, store), entry.host);
        withKeys(entry.figure, entry.chart);
      }
    };
    const show = (next) => {
      store = next;
      for (const { plot, figure, chart } of charts) {
        const data = dataOf(plot, store);
        chart.setData(data);
        const now = plot.series.map(([label], at) => `${label} ${plot.format(data[at + 1].at(-1))}`);
        figure.setAttribute("aria-label", `${plot.title}, now: ${now.join(", ")}`);
      }
    };
    build();
    const resized = new ResizeObserver(() => {
      for (const { host, chart } of charts) {
        if (host.clientWidth > 0 && host.clientWidth !== chart.width) {
          chart.setSize({ width: host.clientWidth, height: HEIGHT });
        }
      }
    });
    resized.observe(below);
    return { show, redraw: build };
  }

  return { create, colour, bytes, rate, count, share, nanoseconds, seconds };
})();
