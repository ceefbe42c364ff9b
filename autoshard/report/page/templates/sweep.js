(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { byId, short, scatter, legend, sortHead } = page;
  const COLOURS = ["--c7", "--c2", "--c4", "--c1", "--c3", "--c6", "--c5", "--c8"];
  const chips = Object.keys(data.chips);
  const colour = Object.fromEntries(chips.map((chip, n) => [chip, `var(${COLOURS[n % COLOURS.length]})`]));
  const DAY = 86400, GIB = 1024 ** 3;
  let order = { key: "days", down: false };

  // An empty or wrong field says nothing: null, never 0 or NaN.
  const number = (field) => (field.value.trim() === "" || !field.validity.valid ? null : Number(field.value));
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

  function plot(kept, front, best, priced) {
    scatter(byId("plot"), {
      points: kept.map((row) => ({
        id: row.id, x: time(row), y: paid(row, priced), said: said(row), className: row === best ? "best" : "", fill: colour[row.chip],
      })),
      lines: [{ points: front.map((row) => [time(row), paid(row, priced)]) }],
      label: "Plans by time and cost",
      xTitle: kept.some((row) => row.days !== null) ? "days" : "seconds of a step",
      onPoint: (id) => point(kept.find((row) => row.id === id)),
    });
  }

  function said(row) {
    const parts = [row.topology, row.batch === null ? "" : `batch ${row.batch}`, row.remat ? `remat ${row.remat}` : "", row.mesh,
      row.days === null ? `step ${short(row.step)} s` : `${short(row.days)} days`, row.cost === null ? "" : `cost ${short(row.cost)}`,
      row.mfu === null ? "" : `MFU ${(100 * row.mfu).toFixed(1)} %`, row.left === null ? "" : `${(row.left / GIB).toFixed(1)} GiB left`];
    return parts.filter(Boolean).join(" · ");
  }

  function pageLink(row, text) {
    const link = document.createElement("a");
    link.href = `./${row.page.split("/").map(encodeURIComponent).join("/")}`;  // whatever its name, a file beside this one
    link.textContent = text;
    link.title = "The page of this plan";
    return link;
  }

  function point(row) {
    byId("pointed").replaceChildren(said(row), ...(row.page ? [" · ", pageLink(row, row.plan)] : row.plan ? [` · ${row.plan}`] : []));
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
    sortHead(head, COLUMNS.map(([name, , key]) => [name, key]), order, (next) => { order = next; draw(); });
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
        if (name === "topology" && row.page) inner.append(pageLink(row, row.topology));
        else inner.textContent = text(row, front);
        if (name === "mesh" || name === "recipe") cell.className = "wide";
        cell.append(inner);
        line.append(cell);
      });
      line.addEventListener("mouseenter", () => point(row));
      return line;
    }));
  }

  legend(byId("chip-legend"), chips.map((chip) => [chip, colour[chip]]));
  byId("assumptions").addEventListener("input", draw);
  byId("assumptions").addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("resize", draw);
  draw();
})();
