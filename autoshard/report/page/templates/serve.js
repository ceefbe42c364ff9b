(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { byId, create, short, scatter, legend, sortHead } = page;
  const COLOURS = ["--c7", "--c2", "--c4", "--c1", "--c3", "--c6", "--c5", "--c8"];
  const GIB = 1024 ** 3, DAY = 86400;
  const devices = (row) => row.tensor * row.attention;
  const degrees = [...new Set(data.points.map(devices))].sort((a, b) => a - b);
  const colour = Object.fromEntries(degrees.map((degree, n) => [degree, `var(${COLOURS[n % COLOURS.length]})`]));
  const varied = (name) => data.points.some((each) => each[name] > 1);
  let order = { key: "token_s", down: false }, all = false, chosen = null;

  // An empty or wrong field says nothing: null, never 0 or NaN.
  const number = (field) => (field.value.trim() === "" || !field.validity.valid ? null : Number(field.value));

  byId("price").value = data.price ?? "";
  ["first", "each", "gap"].forEach((id, n) => { byId(id).value = data.limits[n] === null ? "" : Number((1e3 * data.limits[n]).toPrecision(6)); });

  // A way with answers of another length: prompts come the more often the shorter answers are.
  function answering(point, output) {
    if (output === data.output) return point;
    const apart = point.prompt_engines > 0, decoding = point.engines - point.prompt_engines;
    const token_s = point.decode_s + (apart ? 0 : point.batch / output * point.added_s);
    const decoded = decoding * point.batch / token_s;
    return { ...point, token_s, first_s: point.prompt_s + (apart ? point.sent_s : token_s),
      tokens_per_s: apart ? Math.min(decoded, point.prompt_engines * point.prompt_attention / point.prompt_s * output) : decoded };
  }

  // What each way comes to under the assumptions on the page.
  function figures() {
    const price = number(byId("price")), daily = number(byId("daily"));
    const [first, each, gap] = ["first", "each", "gap"].map((id) => number(byId(id))), most = number(byId("most"));
    const output = number(byId("output")) ?? data.output;
    const rows = data.points.map((each) => answering(each, output)).map((point, id) => {
      const hourly = price === null ? null : price * data.chips;
      const copies = daily === null ? null : Math.ceil(daily * 1e6 / (DAY * point.tokens_per_s));
      return { ...point, id, cost: hourly === null ? null : hourly / 3600 / point.tokens_per_s * 1e6,
        copies, bill: hourly === null || copies === null ? null : 24 * hourly * copies };
    });
    const kept = rows.filter((row) => (first === null || 1e3 * row.first_s <= first) && (each === null || 1e3 * row.token_s <= each)
      && (gap === null || 1e3 * row.gap_s <= gap) && (most === null || row.peak_bytes / GIB <= most) && byId(row.prompt_engines ? "apart" : "together").checked);
    return { rows, kept };
  }

  // None of the frontier is both slower for each token and serves less than another.
  function frontier(kept) {
    const found = [];
    [...kept].sort((a, b) => a.token_s - b.token_s || b.tokens_per_s - a.tokens_per_s).forEach((row) => {
      if (!found.length || row.tokens_per_s > found.at(-1).tokens_per_s) found.push(row);
    });
    return found;
  }

  const alike = (row) => ["tensor", "attention", "experts"].every((name) => row[name] === row[`prompt_${name}`]);
  const other = (row) => (alike(row) ? "" : `x${row.prompt_tensor * row.prompt_attention}`);
  const engines = (row) => (row.prompt_engines ? `${row.prompt_engines}${other(row)}+${row.engines - row.prompt_engines}` : String(row.engines));
  const ms = (value) => short(1e3 * value);

  function said(row) {
    return [`tensor ${row.tensor}`, row.attention > 1 ? `attention ${row.attention}` : "", row.experts > 1 ? `experts ${row.experts}` : "",
      `engines ${engines(row)}`, `batch ${row.batch}`, row.prompt_engines ? "" : `chunks of ${row.chunk}`, `first token after ${ms(row.first_s)} ms`,
      `each token ${ms(row.token_s)} ms`, `${short(row.tokens_per_s)} tokens/s`, `${(row.peak_bytes / GIB).toFixed(1)} GiB of a device`,
      row.cost === null ? "" : `${short(row.cost)} for a million tokens`].filter(Boolean).join(" · ");
  }

  function point(row) {
    chosen = row.id;
    byId("pointed").textContent = said(row);
    byId("flags").replaceChildren(...row.commands.map((command) => create("code", command)));
    for (const each of document.querySelectorAll("#rows tbody tr, #plot circle")) each.classList.toggle("pointed", each.dataset.id === String(row.id));
  }

  const COLUMNS = [
    ["", null, (row, front) => (front.has(row.id) ? "frontier" : "")], ["tensor", "tensor", (row) => String(row.tensor)],
    ...["attention", "experts"].filter(varied).map((name) => [name, name, (row) => String(row[name])]),
    ["engines", "engines", engines], ["batch", "batch", (row) => String(row.batch)],
    ["chunk", "chunk", (row) => (row.prompt_engines ? "" : String(row.chunk))],
    ["first token, ms", "first_s", (row) => ms(row.first_s)], ["each token, ms", "token_s", (row) => ms(row.token_s)], ["gap, ms", "gap_s", (row) => ms(row.gap_s)],
    ["tokens/s", "tokens_per_s", (row) => short(row.tokens_per_s)], ["GiB", "peak_bytes", (row) => (row.peak_bytes / GIB).toFixed(1)],
    ["cost of 1M tokens", "cost", (row) => short(row.cost)], ["copies for a day's", "copies", (row) => short(row.copies)],
    ["cost of a day", "bill", (row) => short(row.bill)],
  ];

  function table(kept, front, best) {
    const columns = COLUMNS.filter(([, key]) => key === null || kept.some((row) => row[key] !== null));
    sortHead(byId("rows").tHead.rows[0], columns, order, (next) => { order = next; draw(); });
    const value = (row) => row[order.key] ?? Infinity;
    const sorted = kept.filter((row) => all || front.has(row.id)).sort((a, b) => value(a) - value(b) || a.id - b.id);
    if (order.down) sorted.reverse();
    byId("rows").tBodies[0].replaceChildren(...sorted.map((row) => {
      const line = create("tr", undefined, row === best ? "best" : "");
      line.dataset.id = row.id;
      line.append(...columns.map(([, , text]) => create("td", text(row, front))));
      line.addEventListener("mouseenter", () => point(row));
      return line;
    }));
  }

  function draw() {
    const { rows, kept } = figures(), front = frontier(kept), best = front.at(-1) || null;
    const ids = new Set(front.map((row) => row.id));
    scatter(byId("plot"), {
      points: kept.map((row) => ({ id: row.id, x: 1e3 * row.token_s, y: row.tokens_per_s, said: said(row), fill: colour[devices(row)], radius: ids.has(row.id) ? 7 : 4,
        className: row === best ? "best" : "" })),
      lines: front.length ? [{ points: front.map((row) => [1e3 * row.token_s, row.tokens_per_s]) }] : [],
      label: "Ways to serve by milliseconds of a token and tokens a second", xTitle: "milliseconds of a token",
      onPoint: (id) => point(rows[id]),
    });
    table(kept, ids, best);
    byId("counted").textContent = `${kept.length} of ${rows.length} ways keep the limits`
      + (best ? `, ${front.length} of them on the frontier; most tokens: ${said(best)}` : "; loosen a limit to see some");
    byId("all-ways").textContent = all ? "Show the frontier alone" : `Show all ${kept.length}, not the frontier alone`;
    byId("all-ways").setAttribute("aria-expanded", String(all));
    const again = kept.find((row) => row.id === chosen) || best;
    if (again) point(again);
    else { byId("pointed").textContent = ""; byId("flags").replaceChildren(); }
  }

  legend(byId("tensor-legend"), degrees.map((degree) => [`${degree} device${degree > 1 ? "s" : ""} an engine`, colour[degree]]));
  byId("all-ways").addEventListener("click", () => { all = !all; draw(); });
  byId("assumptions").addEventListener("input", () => { chosen = null; draw(); });
  byId("assumptions").addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("resize", draw);
  draw();
})();
