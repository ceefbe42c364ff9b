// The ops of a plan: a table that sorts and filters, and a roofline whose points are its rows.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { byId, create, named, bytes, seconds, count, scatter, legend } = page;
  if (!data.ops.length) return;
  const FIRST = 12;
  const FILL = { compute: "var(--c7)", memory: "var(--c2)", network: "var(--c1)", overhead: "var(--c5)", host: "var(--c4)" };
  const peak = Math.max(...Object.values(data.roofs.flops));
  const step = data.step;
  const rows = data.ops.map((row, id) => ({
    ...row, id, share: step ? row.time_s / step : 0,
    rate: row.flops && row.compute_s ? row.flops / row.compute_s : null,
    intensity: row.flops && row.moved_bytes ? row.flops / row.moved_bytes : null,
  }));
  const percent = (value) => (value === null ? "" : `${(100 * value).toFixed(1)} %`);
  let order = { key: "time_s", down: true };
  let wanted = "", all = false;

  const COLUMNS = [
    ["op", "name", (row) => named(row.name)],
    ["time", "time_s", (row) => seconds(row.time_s), "n"],
    ["of the step", "share", (row) => percent(row.share), "n"],
    ["bound by", "bound", (row) => boundCell(row)],
    ["waits", "waited_s", (row) => seconds(row.waited_s), "n"],
    ["FLOPs", "flops", (row) => (row.flops ? count(row.flops) : ""), "n"],
    ["of peak", "rate", (row) => (row.rate === null ? "" : percent(row.rate / peak)), "n"],
    ["memory", "moved_bytes", (row) => (row.moved_bytes ? bytes(row.moved_bytes) : ""), "n"],
    ["wire", "wire_bytes", (row) => (row.wire_bytes ? bytes(row.wire_bytes) : ""), "n"],
    ["parameter", "parameter", parameterCell],
    ["line", "line", (row) => { const made = named(row.line.split("/").at(-1)); made.title = row.line; return made; }],
    ["times", "times", (row) => String(row.times), "n"],
  ];

  // A click shows the parameter where its shape and its split are.
  function parameterCell(row) {
    if (!row.parameter) return "";
    const button = create("button", undefined, "link");
    button.type = "button";
    button.append(named(row.parameter));
    button.title = "Show it among the tensors";
    button.addEventListener("click", () => {
      const search = byId("search");
      search.value = row.parameter.replace(/^\*\.|\.\*$/g, "").split(".*.").at(-1);
      search.dispatchEvent(new Event("input"));
      byId("h-tensors").scrollIntoView();
      search.focus();
    });
    return button;
  }

  function boundCell(row) {
    const cell = create("span"), square = create("i");
    square.style.background = FILL[row.bound];
    cell.append(square, row.bound);
    cell.title = data.bounds[row.bound];
    return cell;
  }

  function said(row) {
    return [row.name, row.parameter, row.line, `${seconds(row.time_s)}, ${percent(row.share)} of the step`,
      row.flops ? `${count(row.flops, "FLOP")}, ${count(row.rate, "FLOP/s")}, ${percent(row.rate / peak)} of peak` : "",
      row.intensity ? `${count(row.intensity, "FLOP")} for each of ${bytes(row.moved_bytes)}` : "",
      row.waited_s ? `waits ${seconds(row.waited_s)} for communication` : "", `bound by ${row.bound}`].filter(Boolean).join(" · ");
  }

  function point(id) {
    byId("op-pointed").textContent = said(rows[id]);
    for (const each of document.querySelectorAll("#op-table tbody tr, #roofline circle")) {
      each.classList.toggle("pointed", each.dataset.id === String(id));
    }
  }

  const matching = () => rows.filter((row) => [row.name, row.full, row.kind, row.line, row.parameter, row.bound]
    .some((text) => text.toLowerCase().includes(wanted)));

  function sorted(kept) {
    const value = (row) => row[order.key] ?? -1;
    const found = [...kept].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return (typeof x === "string" ? x.localeCompare(y) : x - y) || b.id - a.id;
    });
    return order.down ? found.reverse() : found;
  }

  function render() {
    const kept = sorted(matching()), shown = all || wanted ? kept : kept.slice(0, FIRST);
    byId("op-table").tHead.rows[0].replaceChildren(...COLUMNS.map(([name, key, , className]) => {
      const cell = create("th", undefined, className), button = create("button", name);
      cell.scope = "col";
      button.type = "button";
      if (order.key === key) cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      button.addEventListener("click", () => {
        order = { key, down: order.key === key ? !order.down : className === "n" };
        render();
        [...byId("op-table").querySelectorAll("th button")].find((each) => each.textContent === name).focus();
      });
      cell.append(button);
      return cell;
    }));
    byId("op-table").tBodies[0].replaceChildren(...shown.map((row) => {
      const line = create("tr");
      line.dataset.id = row.id;
      line.title = row.full;
      for (const [, key, cellOf, className] of COLUMNS) {
        const cell = create("td", undefined, className || (key === "bound" ? "" : "long"));
        cell.append(cellOf(row));
        line.append(cell);
      }
      line.addEventListener("mouseenter", () => point(row.id));
      return line;
    }));
    const together = kept.reduce((sum, row) => sum + row.time_s, 0);
    byId("op-found").textContent = wanted ? `${kept.length} found, ${seconds(together) || "0 s"} together` : "";
    const button = byId("all-ops");
    button.hidden = Boolean(wanted) || rows.length <= FIRST;
    button.textContent = all ? `Show the first ${FIRST}` : `Show all ${rows.length}`;
    button.setAttribute("aria-expanded", String(all));
  }

  function roofline() {
    const points = rows.filter((row) => row.intensity !== null && row.rate !== null);
    byId("roofline").hidden = !points.length;
    if (!points.length) return;
    const ridge = peak / data.roofs.bytes;
    const xs = [...points.map((row) => row.intensity), ridge], ys = [...points.map((row) => row.rate), peak];
    const x = [Math.min(...xs) / 2, Math.max(...xs) * 4];
    const y = [Math.min(...ys) / 2, peak * 2];
    const lines = Object.entries(data.roofs.flops).map(([dtype, flops]) => {
      const from = Math.max(x[0], y[0] / data.roofs.bytes), corner = flops / data.roofs.bytes;
      const start = from < corner ? [[from, from * data.roofs.bytes], [corner, flops]] : [[from, flops]];
      return { points: [...start, [x[1], flops]], className: "roof", text: `${count(flops, "FLOP/s")} ${dtype}` };
    });
    const longest = Math.max(...points.map((row) => row.time_s));
    // Larger ones first, so that smaller ones can be reached.
    scatter(byId("roofline"), {
      points: [...points].sort((a, b) => b.time_s - a.time_s).map((row) => ({
        id: row.id, x: row.intensity, y: row.rate, said: said(row), fill: FILL[row.bound], radius: 4 + 9 * Math.sqrt(row.time_s / longest),
      })),
      lines, ranges: { x, y }, label: "Ops by FLOPs for each byte and FLOP/s", xTitle: "FLOPs for each byte of main memory",
      xText: count, yText: (value) => count(value, "F/s"), onPoint: point,
    });
  }

  legend(byId("bound-legend"), [...new Set(rows.map((row) => row.bound))].map((bound) => [`bound by ${bound}`, FILL[bound]]));
  byId("op-filter").addEventListener("input", (event) => { wanted = event.target.value.trim().toLowerCase(); render(); });
  byId("all-ops").addEventListener("click", () => { all = !all; render(); });
  window.addEventListener("resize", roofline);
  window.addEventListener("beforeprint", roofline);
  render();
  roofline();
})();
