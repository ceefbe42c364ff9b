"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const COLOURS = ["--c7", "--c2", "--c4", "--c1", "--c3", "--c6", "--c5", "--c8"];
  const chips = Object.keys(data.chips);
  const colour = Object.fromEntries(chips.map((chip, n) => [chip, `var(${COLOURS[n % COLOURS.length]})`]));
  const DAY = 86400, GIB = 1024 ** 3;
  let order = { key: "days", down: false };

  // An empty or wrong field says nothing: null, never 0 or NaN.
  const number = (field) => (field.value.trim() === "" || !field.validity.valid ? null : Number(field.value));
  const short = (value) => (value === null ? "" : Math.abs(value) >= 1e4
    ? Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value)
    : String(Number(value.toPrecision(4))));

  byId("tokens").value = data.tokens / 1e9;
  document.querySelectorAll("[data-chip]").forEach((field) => { field.value = data.chips[field.dataset.chip] ?? ""; });

  // What each row comes to under the assumptions on the page.
  function figures() {
    const tokens = number(byId("tokens"));
    const price = Object.fromEntries([...document.querySelectorAll("[data-chip]")].map((f) => [f.dataset.chip, number(f)]));
    const shown = new Set([...document.querySelectorAll("[data-shown]")].filter((f) => f.checked).map((f) => f.dataset.shown));
    const rows = data.rows.map((row, id) => {
      const each = row.tokens ? row.step / row.tokens : null;
      const days = each === null || tokens === null ? null : tokens * 1e9 * each / DAY;
      const hourly = price[row.chip] === null ? null : price[row.chip] * row.chips;
      const cost = days === null || hourly === null ? null : days * 24 * hourly;
      const rate = each === null ? null : 1 / each;
      return { ...row, id, days, cost, rate, perChip: rate === null ? null : rate / row.chips };
    });
    const [most, left, dear] = ["most-chips", "least-left", "most-cost"].map((id) => number(byId(id)));
    const kept = rows.filter((row) => shown.has(row.chip)
      && (most === null || row.chips <= most)
      && (left === null || (row.left !== null && row.left / GIB >= left))
      && (dear === null || (row.cost !== null && row.cost <= dear)));
    return { rows, kept, priced: kept.length > 0 && kept.every((row) => row.cost !== null) };
  }

  const time = (row) => row.days ?? row.step;
  const paid = (row, priced) => (priced ? row.cost : row.chips);

  // None of the frontier is both slower and dearer than another.
  function frontier(kept, priced) {
    const found = [];
    [...kept].sort((a, b) => time(a) - time(b) || paid(a, priced) - paid(b, priced)).forEach((row) => {
      if (!found.length || paid(row, priced) < paid(found.at(-1), priced)) found.push(row);
    });
    return found;
  }

  function draw() {
    const { rows, kept, priced } = figures();
    const front = frontier(kept, priced);
    const best = priced ? front.at(-1) : front[0];
    const least = kept.length ? kept.reduce((a, b) => (b.chips < a.chips || (b.chips === a.chips && time(b) < time(a)) ? b : a)) : null;
    byId("plot-title").textContent = `${priced ? "Cost of the run" : "Chips"} over ${kept.some((r) => r.days !== null) ? "days" : "seconds of a step"}`;
    byId("counted").textContent = `${kept.length} of ${rows.length} plans`
      + (best ? `; ${priced ? "cheapest" : "fastest"}: ${best.topology}; fewest chips: ${least.topology}` : "; loosen a filter to see some")
      + (priced || !kept.length ? "" : "; not every chip has a price, so that chips stand for cost");
    plot(kept, front, best, priced);
    table(kept, new Set(front.map((row) => row.id)), best);
  }

  function shape(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // Marks at 1, 2, 5 and so on of a scale by factors.
  function marks(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.ceil(Math.log10(high)); power += 1) {
      [1, 2, 5].forEach((digit) => { const at = digit * 10 ** power; if (at >= low && at <= high) found.push(at); });
    }
    return found.length > 8 ? found.filter((at) => /^1/.test(at.toExponential())) : found;
  }

  function plot(kept, front, best, priced) {
    const width = Math.max(280, byId("plot").clientWidth), height = 340, margin = { left: 64, right: 18, top: 14, bottom: 40 };
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Plans by time and cost" });
    byId("plot").replaceChildren(svg);
    if (!kept.length) return;
    const range = (values) => [Math.min(...values) / 1.15, Math.max(...values) * 1.15];
    const [x0, x1] = range(kept.map(time)), [y0, y1] = range(kept.map((row) => paid(row, priced)));
    const x = (value) => margin.left + (width - margin.left - margin.right) * Math.log(value / x0) / Math.log(x1 / x0);
    const y = (value) => height - margin.bottom - (height - margin.top - margin.bottom) * Math.log(value / y0) / Math.log(y1 / y0);
    marks(x0, x1).forEach((at) => {
      svg.append(shape("line", { x1: x(at), x2: x(at), y1: margin.top, y2: height - margin.bottom }));
      svg.append(shape("text", { x: x(at), y: height - margin.bottom + 16, "text-anchor": "middle" }, short(at)));
    });
    marks(y0, y1).forEach((at) => {
      svg.append(shape("line", { x1: margin.left, x2: width - margin.right, y1: y(at), y2: y(at) }));
      svg.append(shape("text", { x: margin.left - 6, y: y(at) + 4, "text-anchor": "end" }, short(at)));
    });
    svg.append(shape("text", { x: width - margin.right, y: height - 6, "text-anchor": "end" },
      kept.some((row) => row.days !== null) ? "days" : "seconds of a step"));
    svg.append(shape("polyline", { points: front.map((row) => `${x(time(row))},${y(paid(row, priced))}`).join(" ") }));
    kept.forEach((row) => {
      const dot = shape("circle", {
        cx: x(time(row)), cy: y(paid(row, priced)), r: 6, tabindex: 0, role: "img", "data-id": row.id,
        "aria-label": said(row), class: row === best ? "best" : "", style: `fill: ${colour[row.chip]}`,
      });
      ["mouseenter", "focus", "click"].forEach((event) => dot.addEventListener(event, () => point(row)));
      svg.append(dot);
    });
  }

  function said(row) {
    const parts = [row.topology, row.batch === null ? "" : `batch ${row.batch}`, row.remat ? `remat ${row.remat}` : "", row.mesh,
      row.days === null ? `step ${short(row.step)} s` : `${short(row.days)} days`, row.cost === null ? "" : `cost ${short(row.cost)}`,
      row.mfu === null ? "" : `MFU ${(100 * row.mfu).toFixed(1)} %`, row.left === null ? "" : `${(row.left / GIB).toFixed(1)} GiB left`];
    return parts.filter(Boolean).join(" · ");
  }

  function point(row) {
    byId("pointed").textContent = said(row) + (row.plan ? ` · ${row.plan}` : "");
    document.querySelectorAll("#rows tbody tr").forEach((line) => line.classList.toggle("pointed", line.dataset.id === String(row.id)));
  }

  const COLUMNS = [
    ["", (row, front) => (front.has(row.id) ? "frontier" : ""), null],
    ["topology", (row) => row.topology, "topology"], ["chips", (row) => short(row.chips), "chips"],
    ["batch", (row) => (row.batch === null ? "" : String(row.batch)), "batch"],
    ["step, s", (row) => short(row.step), "step"], ["tokens/s", (row) => short(row.rate), "rate"],
    ["tokens/s/chip", (row) => short(row.perChip), "perChip"],
    ["MFU", (row) => (row.mfu === null ? "" : `${(100 * row.mfu).toFixed(1)} %`), "mfu"],
    ["days", (row) => short(row.days), "days"], ["cost", (row) => short(row.cost), "cost"],
    ["GiB left", (row) => (row.left === null ? "" : (row.left / GIB).toFixed(1)), "left"],
    ["mesh", (row) => row.mesh, null], ["recipe", (row) => row.recipe || (row.remat ? `remat ${row.remat}` : ""), null],
  ];

  function table(kept, front, best) {
    const head = document.querySelector("#rows thead tr"), body = document.querySelector("#rows tbody");
    head.replaceChildren(...COLUMNS.map(([name, , key]) => {
      const cell = document.createElement("th");
      if (key === null) { cell.textContent = name; return cell; }
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      if (order.key === key) cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      button.addEventListener("click", () => {
        order = { key, down: order.key === key && !order.down };
        draw();
        [...document.querySelectorAll("#rows th button")].find((each) => each.textContent === name).focus();
      });
      cell.append(button);
      return cell;
    }));
    const value = (row) => row[order.key] ?? Infinity;
    const sorted = [...kept].sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a.id - b.id));
    if (order.down) sorted.reverse();
    body.replaceChildren(...sorted.map((row) => {
      const line = document.createElement("tr");
      line.dataset.id = row.id;
      if (row === best) line.className = "best";
      COLUMNS.forEach(([name, text]) => {
        const cell = document.createElement("td");
        const inner = document.createElement("bdi");
        inner.textContent = text(row, front);
        if (name === "mesh" || name === "recipe") cell.className = "wide";
        cell.append(inner);
        line.append(cell);
      });
      line.addEventListener("mouseenter", () => point(row));
      return line;
    }));
  }

  byId("chip-legend").replaceChildren(...chips.map((chip) => {
    const entry = document.createElement("span");
    const square = document.createElement("i");
    square.style.background = colour[chip];
    entry.append(square, chip);
    return entry;
  }));
  byId("assumptions").addEventListener("input", draw);
  byId("assumptions").addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("resize", draw);
  draw();
})();
