// The page of the daemon: asks it once a second while it can be seen, and shows what it answers.
//
// Invariants: data becomes text and numbers of elements, never markup. There is at most one request at a time, and each
// has a time limit. What is kept is bounded by the length of a history. `data-state` of the body is `live`, `away` (it
// does not answer), `token` (it wants one) or `starting`; `data-value` of an element is its exact number. A device or a
// range that was chosen stays chosen in its tab, also when the page is loaded again or the device was gone meanwhile.
"use strict";

(() => {
  const { bytes, rate, count, share, nanoseconds, seconds } = CbdPlots;
  const POLL_MS = 1000;
  const TIMEOUT_MS = 5000;
  const OLD_MS = 5000;
  const CELLS = 256;
  // Every so many milliseconds: minutes change slowly, and a map is made from the index.
  const WEEK_EVERY_MS = 10000;
  const MAP_EVERY_MS = 4000;
  const TOKEN = "cbd-token";
  const DEVICE = "cbd-device";
  const RANGE = "cbd-range";

  const element = (id) => document.getElementById(id);
  const state = { instance: null, backend: null, range: "hour", store: null, map: null, awaySince: null, events: null,
    answer: null, present: {}, historyAt: 0, mapAt: 0, timer: null, busy: false, again: false, generation: 0 };

  // ---- elements

  function made(kind, text, className) {
    const node = document.createElement(kind);
    node.textContent = text;
    if (className) {
      node.className = className;
    }
    return node;
  }

  function setText(node, text) {
    if (node.textContent !== text) {
      node.textContent = text;
    }
  }

  function setRows(body, rows) {
    // What is the same stays, so that a selection of text does.
    const key = JSON.stringify(rows);
    if (body.dataset.key === key) {
      return;
    }
    body.dataset.key = key;
    body.replaceChildren(...rows.map((cells) => {
      const row = document.createElement("tr");
      const withClass = cells.map((cell) => (Array.isArray(cell) ? cell : [cell]));
      row.append(...withClass.map(([text, className]) => made("td", String(text), className)));
      return row;
    }));
  }

  function addTiles(list, tiles) {
    for (const { id, label } of tiles) {
      const tile = document.createElement("div");
      const value = made("dd", "–");
      value.id = id;
      tile.append(made("dt", label), value);
      list.append(tile);
    }
  }

  function setTile(id, value, text) {
    const tile = element(id);
    if (value === null || value === undefined) {
      delete tile.dataset.value;
    } else {
      tile.dataset.value = value;
    }
    setText(tile, text);
    tile.title = text;
  }

  const perSecond = (name, format) => (point) => {
    const value = point[name];
    const isKnown = value !== null && value !== undefined && point.span_ms > 0;
    return [value, isKnown ? format((value * 1000) / point.span_ms) : "–"];
  };
  const requests = (value) => `${count(value < 10 ? value : Math.round(value))}/s`;
  const plain = (name, format) => (point) => [point[name], format(point[name])];
  const TILES = [
    { id: "tile-reads", label: "reads", of: perSecond("reads", requests) },
    { id: "tile-writes", label: "writes", of: perSecond("writes", requests) },
    { id: "tile-read-bytes", label: "read", of: perSecond("read_bytes", rate) },
    { id: "tile-written-bytes", label: "written", of: perSecond("written_bytes", rate) },
    { id: "tile-hit-ratio", label: "hit ratio of bytes", of: (point) => {
      const isKnown = point.read_bytes > 0 && point.read_hit_bytes !== null;
      const ratio = isKnown ? point.read_hit_bytes / point.read_bytes : null;
      return [ratio, share(ratio)];
    } },
    { id: "tile-read-p99", label: "read latency p99", of: plain("read_p99_ns", nanoseconds) },
    { id: "tile-write-p99", label: "write latency p99", of: plain("write_p99_ns", nanoseconds) },
    { id: "tile-dirty", label: "dirty", of: plain("dirty_bytes", bytes) },
    { id: "tile-target", label: "target of dirty", of: (_, backend) => {
      const target = backend?.cache?.pace?.target_bytes;
      return [target, bytes(target)];
    } },
    { id: "tile-recovery-point", label: "recovery point age", of: (point) => {
      const age = point.recovery_point_age_ms ?? null;
      return [age, seconds(age === null ? null : age / 1000)];
    } },
    { id: "tile-time-to-empty", label: "time to empty", of: (_, backend) => {
      const time = backend?.cache?.dirty_bytes === 0 ? 0 : backend?.time_to_empty_s;
      return [time, seconds(time)];
    } },
  ];
  const TOTALS = [
    { id: "total-reads", label: "reads", operation: "read", name: "requests", format: count },
    { id: "total-writes", label: "writes", operation: "write", name: "requests", format: count },
    { id: "total-read-bytes", label: "read", operation: "read", name: "bytes", format: bytes },
    { id: "total-written-bytes", label: "written", operation: "write", name: "bytes", format: bytes },
  ];

  // ---- what the daemon answers

  const keyOf = (transport, backend) => `${transport.transport_id}/${backend.uuid}`;
  const nameOf = (transport, backend) =>
    `${transport.transport_id}/${backend.backend_id} ${backend.name ?? backend.backend_path}`;
  const backendsOf = (status) =>
    status.transports.flatMap((transport) => transport.backends.map((backend) => ({ transport, backend })));

  class Refused extends Error {
    constructor(status, text) {
      super(text);
      this.status = status;
    }
  }

  class Unreachable extends Error {}

  async function ask(path) {
    const token = sessionStorage.getItem(TOKEN);
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    let answer;
    let text;
    try {
      answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
      text = await answer.text();
    } catch (error) {
      throw new Unreachable(error.message);
    }
    if (!answer.ok) {
      throw new Refused(answer.status, text.trim());
    }
    return JSON.parse(text);
  }

  const chosenQuery = () => {
    const slash = state.backend.indexOf("/");
    return `transport=${state.backend.slice(0, slash)}&backend=${encodeURIComponent(state.backend.slice(slash + 1))}`;
  };

  // Forgets the history and the map, which are those of another device, range or run of the daemon.
  function forget() {
    state.generation += 1;
    state.store = null;
    state.map = null;
    state.historyAt = 0;
    state.mapAt = 0;
  }

  function append(answer) {
    const store = state.store ?? { ticks: [], columns: {}, next: 0 };
    store.originS = answer.origin_ms / 1000;
    store.stepS = answer.step_s;
    store.next = answer.next;
    const skipped = answer.ticks.findIndex((tick) => tick > (store.ticks.at(-1) ?? 0));
    const from = skipped < 0 ? answer.ticks.length : skipped;
    store.ticks.push(...answer.ticks.slice(from));
    for (const [name, values] of Object.entries(answer.columns)) {
      (store.columns[name] ??= []).push(...values.slice(from));
    }
    const oldest = (store.ticks.at(-1) ?? 0) - answer.length;
    const kept = store.ticks.findIndex((tick) => tick > oldest);
    if (kept > 0) {
      store.ticks.splice(0, kept);
      Object.values(store.columns).forEach((values) => values.splice(0, kept));
    }
    state.store = store;
  }

  async function updateHistory() {
    const due = state.range === "hour" ? 0 : WEEK_EVERY_MS;
    if (state.store && performance.now() - state.historyAt < due) {
      return;
    }
    state.historyAt = performance.now();
    // A range is a few answers long.
    for (let part = 0; part < 16; part += 1) {
      const generation = state.generation;
      const since = state.store?.next ?? 0;
      const answer = await ask(`page/history?${chosenQuery()}&range=${state.range}&since=${since}`);
      if (generation !== state.generation) {
        return;
      }
      append(answer);
      if (!answer.more) {
        break;
      }
    }
    plots.show({ ...state.store, present: state.present });
  }

  async function updateMap() {
    if (state.map && performance.now() - state.mapAt < MAP_EVERY_MS) {
      return;
    }
    state.mapAt = performance.now();
    const generation = state.generation;
    const map = await ask(`page/map?${chosenQuery()}&cells=${CELLS}`);
    if (generation === state.generation) {
      state.map = map;
      drawMap();
    }
  }

  // What one device lacks, such as a history just after its start, is not what the daemon lacks.
  async function orNothing(update, nothing) {
    try {
      await update();
    } catch (error) {
      if (!(error instanceof Refused) || error.status === 401) {
        throw error;
      }
      nothing(error);
    }
  }

  // ---- what is shown

  function setState(name, connection) {
    document.body.dataset.state = name;
    setText(element("connection"), connection);
    element("token-form").hidden = name !== "token";
    element("main").hidden = name === "token";
  }

  function warningsOf(status) {
    const found = [...status.warnings];
    for (const transport of status.transports) {
      if (!transport.alive) {
        found.push(`region ${transport.path} is not served`);
      }
    }
    for (const { transport, backend } of backendsOf(status)) {
      const cache = backend.cache ?? {};
      const { file_change, unchecked, silent, held_error } = backend;
      const own = [...(backend.warnings ?? []), file_change, unchecked, silent, held_error];
      if (!backend.alive) {
        own.push("is not served");
      }
      if (cache.void) {
        own.push(`the disk alone is not crash-consistent: ${cache.void}`);
      }
      if (cache.stalled) {
        own.push(`stalled: ${cache.last_error ?? "the disk refuses writes"}`);
      } else if (cache.backing_errors > 0) {
        own.push(`the disk fails: ${cache.last_error ?? "writes fail"}`);
      }
      if (cache.parked_bytes > 0) {
        own.push(`${bytes(cache.parked_bytes)} are parked: ${cache.parked_error ?? "the disk refuses them"}`);
      }
      if (cache.quarantined_bytes > 0) {
        own.push(`${bytes(cache.quarantined_bytes)} are quarantined: reads of them fail`);
      }
      found.push(...own.filter(Boolean).map((text) => `${nameOf(transport, backend)}: ${text}`));
    }
    return found;
  }

  function showWarnings(status) {
    const list = element("warnings");
    const found = warningsOf(status);
    const key = JSON.stringify(found);
    if (list.dataset.key !== key) {
      list.dataset.key = key;
      list.replaceChildren(...(found.length ? found.map((text) => made("li", text)) : [made("li", "none", "none")]));
    }
  }

  // The devices to choose from; the first one while the chosen one is gone, as during a restart.
  function showChoice(status) {
    const all = backendsOf(status);
    const select = element("backend");
    const labels = all.map(({ transport, backend }) => [keyOf(transport, backend), nameOf(transport, backend)]);
    const key = JSON.stringify(labels);
    if (select.dataset.key !== key) {
      select.dataset.key = key;
      select.replaceChildren(...labels.map(([value, label]) => {
        const option = made("option", label);
        option.value = value;
        return option;
      }));
    }
    const wanted = sessionStorage.getItem(DEVICE) ?? state.backend;
    const shown = labels.some(([value]) => value === wanted) ? wanted : labels[0]?.[0] ?? null;
    if (shown !== null && sessionStorage.getItem(DEVICE) === null) {
      sessionStorage.setItem(DEVICE, shown);
    }
    if (shown !== state.backend) {
      choose(shown);
    }
    // An open list keeps the place of its cursor.
    if (select.value !== (state.backend ?? "")) {
      select.value = state.backend ?? "";
    }
    element("backend-choice").hidden = all.length < 2;
  }

  function showTables(status) {
    const used = (transport) => transport.segment_num - transport.free_segments;
    setRows(element("regions"), status.transports.map((transport) => [
      transport.transport_id, transport.path, transport.alive ? "served" : ["not served", "error"],
      bytes(transport.size), `${used(transport)} of ${transport.segment_num}`, transport.free_segments]));
    setRows(element("devices"), backendsOf(status).map(({ transport, backend }) => {
      const cache = backend.cache;
      return [`${transport.transport_id}/${backend.backend_id}`, backend.name ?? "", backend.backend_path,
        backend.alive ? "served" : ["not served", "error"],
        backend.blkdevs.map((device) => device.dev_name).join(", "), bytes(backend.size),
        cache ? `${bytes(cache.size)}, ${cache.cache_mode}` : "none",
        cache ? `${backend.cache_used_segs} of ${backend.cache_segs}` : "–", cache ? cache.free_segments : "–",
        bytes((cache ?? backend.held)?.dirty_bytes), share(cache?.read_hit_ratio)];
    }));
  }

  function showEvents(events) {
    setRows(element("events"), [...events].reverse().map((event) => [
      new Date(event.time_ms).toLocaleString(), [event.severity, `severity-${event.severity}`], event.name,
      event.text]));
  }

  function showNumbers(answer) {
    const point = answer.latest[state.backend] ?? {};
    const isChosen = ({ transport, backend }) => keyOf(transport, backend) === state.backend;
    const chosen = backendsOf(answer.status).find(isChosen);
    for (const { id, of } of TILES) {
      setTile(id, ...of(point, chosen?.backend));
    }
    state.present = { target_bytes: chosen?.backend.cache?.pace?.target_bytes };
    for (const { id, operation, name, format } of TOTALS) {
      const total = chosen ? (chosen.backend.operations?.[operation]?.[name] ?? 0) : null;
      setTile(id, total, format(total));
    }
  }

  // Columns of a map that has about this shape; rows are full where the number of cells allows.
  function columnsOf(number, shape) {
    const wanted = Math.min(number, Math.max(1, Math.ceil(Math.sqrt(number * shape))));
    const off = (columns) => Math.abs(Math.log2(columns / wanted));
    const fits = Array.from({ length: number }, (_, at) => at + 1).filter((columns) => number % columns === 0);
    const best = fits.reduce((one, other) => (off(other) < off(one) ? other : one));
    return off(best) <= 1 ? best : wanted;
  }

  // The cells of the map in rows, each with the colour of the first of dirty, read, cached that it has any of.
  function drawMap() {
    const canvas = element("map");
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const map = state.map;
    if (!map || map.cells.length === 0 || width === 0) {
      return;
    }
    const number = map.cells.length;
    const columns = columnsOf(number, width / height);
    const rows = Math.ceil(number / columns);
    const [across, down] = [width / columns, height / rows];
    const names = ["dirty", "read", "cached", "empty"];
    const colours = Object.fromEntries(names.map((name) => [name, CbdPlots.colour(name)]));
    const sum = { cached: 0, dirty: 0, read: 0 };
    map.cells.forEach((cell, at) => {
      const size = Math.min(map.cell_bytes, map.size - at * map.cell_bytes);
      const corner = [(at % columns) * across, Math.floor(at / columns) * down];
      const box = [...corner, Math.max(across - 1, 1), Math.max(down - 1, 1)];
      context.globalAlpha = 1;
      context.fillStyle = colours.empty;
      context.fillRect(...box);
      const kind = ["dirty", "read", "cached"].find((name) => cell[`${name}_bytes`] > 0);
      if (kind) {
        context.globalAlpha = 0.35 + 0.65 * Math.min(cell[`${kind}_bytes`] / size, 1);
        context.fillStyle = colours[kind];
        context.fillRect(...box);
      }
      for (const name of Object.keys(sum)) {
        sum[name] += cell[`${name}_bytes`];
      }
    });
    const of = (name) => `${bytes(sum[name])} (${share(map.size > 0 ? sum[name] / map.size : 0)})`;
    const about = map.sampled_one_of > 1 ? "About " : "";
    const text = `${about}${of("cached")} of ${bytes(map.size)} are in the cache: ${of("dirty")} are dirty, ` +
      `${of("read")} were read again since they were cached.`;
    canvas.setAttribute("aria-label", text);
    canvas.dataset.cached = sum.cached;
    canvas.dataset.dirty = sum.dirty;
    const sampled = map.sampled_one_of > 1 ? ` One block in ${map.sampled_one_of} was looked at.` : "";
    const cell = `Each cell is ${bytes(map.cell_bytes)} of the device, from its first byte at the top left.`;
    setText(element("map-caption"), `${text} ${cell} A cell has the colour of the first of dirty, read and cached ` +
      `that it has any of, the fuller the more of it.${sampled}`);
  }

  function noMap(error) {
    state.map = null;
    drawMap();
    element("map").setAttribute("aria-label", "no map");
    setText(element("map-caption"), error.message);
  }

  function noHistory() {
    state.store = null;
    plots.show({ ticks: [], columns: {}, originS: 0, stepS: 1 });
  }

  // ---- the loop

  function choose(key) {
    state.backend = key;
    forget();
    noHistory();
    noMap({ message: key === null ? "There is no device." : "" });
    if (state.answer) {
      // Otherwise the numbers would be those of the former device for as long as the daemon is away.
      showNumbers(state.answer);
    }
  }

  async function update() {
    const answer = await ask("page/status");
    if (answer.instance !== state.instance) {
      state.instance = answer.instance;
      forget();
    }
    const { status } = answer;
    state.answer = answer;
    showChoice(status);
    setText(element("version"), answer.version);
    setText(element("uptime"), seconds(answer.uptime_s));
    showWarnings(status);
    showNumbers(answer);
    showTables(status);
    showEvents(answer.events);
    if (state.backend !== null) {
      await orNothing(updateHistory, noHistory);
      await orNothing(updateMap, noMap);
    }
    state.awaySince = null;
    const old = answer.sampled_ms_ago > OLD_MS;
    setState("live", old ? `the figures are ${seconds(Math.round(answer.sampled_ms_ago / 1000))} old` : "live");
    document.body.dataset.instance = answer.instance;
  }

  function failed(error) {
    if (error instanceof Refused && error.status === 401) {
      const isWrong = sessionStorage.getItem(TOKEN) !== null;
      sessionStorage.removeItem(TOKEN);
      setText(element("token-error"), isWrong ? "The daemon refuses this token." : "");
      setState("token", "a token is needed");
      element("token-input").focus();
      return;
    }
    state.awaySince ??= new Date();
    const since = state.awaySince.toLocaleTimeString();
    const isAnswer = error instanceof Refused;
    const reason = isAnswer ? `the daemon answers: ${error.message}` : `the daemon cannot be reached since ${since}`;
    setState("away", reason);
  }

  // Asks now, and then once a second while the page is seen and needs no token.
  async function poll() {
    clearTimeout(state.timer);
    if (state.busy) {
      state.again = true;
      return;
    }
    const wantsToken = document.body.dataset.state === "token" && sessionStorage.getItem(TOKEN) === null;
    if (document.hidden || wantsToken) {
      return;
    }
    state.busy = true;
    const began = performance.now();
    try {
      await update();
    } catch (error) {
      failed(error);
      if (!(error instanceof Refused || error instanceof Unreachable)) {
        console.error(error);
      }
    }
    state.busy = false;
    const isAsked = state.again;
    state.again = false;
    if (document.body.dataset.state !== "token") {
      state.timer = setTimeout(poll, isAsked ? 0 : Math.max(POLL_MS - (performance.now() - began), 100));
    }
  }

  function setToken(token) {
    // Other characters cannot be in a header.
    if (/^[\x21-\x7e]+$/.test(token)) {
      sessionStorage.setItem(TOKEN, token);
      return true;
    }
    setText(element("token-error"), "A token has letters, digits and signs of ASCII, without spaces.");
    return false;
  }

  // A token in the address, which would stay in the history of the browser.
  function takeToken() {
    const given = /^#token=(.*)$/s.exec(location.hash);
    if (given) {
      history.replaceState(null, "", location.pathname + location.search);
      try {
        setToken(decodeURIComponent(given[1]));
      } catch {
        setToken("");
      }
    }
    return Boolean(given);
  }

  function setRange(range) {
    state.range = range;
    sessionStorage.setItem(RANGE, range);
    for (const name of ["hour", "week"]) {
      element(`range-${name}`).setAttribute("aria-pressed", String(name === range));
    }
    forget();
    noHistory();
  }

  function chooseRange(range) {
    setRange(range);
    poll();
  }

  addTiles(element("tiles"), TILES);
  addTiles(element("totals"), TOTALS);
  const plots = CbdPlots.create(element("plots"));
  takeToken();
  setRange(sessionStorage.getItem(RANGE) === "week" ? "week" : "hour");
  element("range-hour").onclick = () => chooseRange("hour");
  element("range-week").onclick = () => chooseRange("week");
  element("backend").onchange = (event) => {
    sessionStorage.setItem(DEVICE, event.target.value);
    choose(event.target.value);
    poll();
  };
  element("token").onsubmit = (event) => {
    event.preventDefault();
    if (setToken(element("token-input").value.trim())) {
      element("token-input").value = "";
      poll();
    }
  };
  addEventListener("hashchange", () => takeToken() && poll());
  document.addEventListener("visibilitychange", poll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    plots.redraw();
    drawMap();
  });
  new ResizeObserver(drawMap).observe(element("map"));
  poll();
})();
