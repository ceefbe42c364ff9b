// The memory chart: the tensors that are alive where one points.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent).memory;
  const { byId, create, shape, named, bytes, seconds } = page;
  const chart = byId("memory-chart");
  if (!chart || !data) return;
  const FIRST = 10;
  const last = data.moments.length - 1;
  const words = (kind) => kind.replace(/_/g, " ");
  const totals = data.moments.map((_, at) => Object.values(data.kinds).reduce((sum, sizes) => sum + sizes[at], 0));
  let now = totals.indexOf(Math.max(...totals));
  let pinned = false, all = false;
  const cursor = shape("line", { class: "cursor", y1: 0, y2: 180 });
  chart.append(cursor);

  function held(at) {
    const found = data.held.filter(([, , , , first, until]) => first <= at && at <= until);
    const listed = {};
    found.forEach(([, kind, , size]) => { listed[kind] = (listed[kind] || 0) + size; });
    const rest = Object.entries(data.kinds).map(([kind, sizes]) => [kind, sizes[at] - (listed[kind] || 0)]).filter(([, size]) => size > 0);
    return [found, rest];
  }

  function row(name, kind, count, size, of) {
    const line = create("tr"), first = create("td", undefined, "long"), second = create("td"), square = create("i");
    first.append(named(name));
    square.className = `m-${kind.replace(/_/g, "-")}`;
    second.append(square, words(kind));
    line.append(first, create("td", bytes(size), "n"), create("td", `${(100 * size / of).toFixed(1)} %`, "n"), second, create("td", count, "n"));
    return line;
  }

  function show(at) {
    now = Math.max(0, Math.min(last, at));
    const x = 1000 * now / last;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    const [found, rest] = held(now), total = totals[now];
    const shown = all ? found : found.slice(0, FIRST);
    const others = Object.fromEntries(rest);
    found.slice(shown.length).forEach(([, kind, , size]) => { others[kind] = (others[kind] || 0) + size; });
    byId("held").tBodies[0].replaceChildren(
      ...shown.map(([name, kind, count, size]) => row(name, kind, String(count), size, total)),
      ...Object.entries(others).sort((a, b) => b[1] - a[1]).map(([kind, size]) => row("all others", kind, "", size, total)),
    );
    const said = `${bytes(total)} at moment ${now + 1} of ${last + 1}, ${seconds(data.moments[now]) || "0 s"} into the step${pinned ? " (held; click again to let go)" : ""}`;
    byId("held-note").textContent = said;
    chart.setAttribute("aria-valuenow", now + 1);
    chart.setAttribute("aria-valuetext", said);
    const button = byId("all-held");
    button.hidden = found.length <= FIRST;
    button.textContent = all ? `Show the largest ${FIRST}` : `Show all ${found.length} that are kept`;
    button.setAttribute("aria-expanded", String(all));
  }

  const place = (event) => {
    const box = chart.getBoundingClientRect();
    return Math.round(last * (event.clientX - box.left) / box.width);
  };
  chart.addEventListener("pointermove", (event) => { if (!pinned) show(place(event)); });
  chart.addEventListener("click", (event) => { pinned = !pinned; show(place(event)); });
  chart.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(last / 10));
    const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, PageDown: now - far, PageUp: now + far, Home: 0, End: last };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
  byId("all-held").addEventListener("click", () => { all = !all; show(now); });
  show(now);
})();
