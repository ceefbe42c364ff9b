(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { byId, create, named, bytes, seconds } = page;
  const mesh = data.mesh;
  const total = mesh.reduce((product, [, size]) => product * size, 1);
  const place = new Int32Array(total);  // device -> position in the mesh
  data.deviceOrder.forEach((device, position) => { place[device] = position; });

  // Where a device stands on each mesh axis, major first.
  function coordinates(position) {
    const result = {};
    for (let k = mesh.length - 1; k >= 0; k -= 1) {
      result[mesh[k][0]] = position % mesh[k][1];
      position = Math.floor(position / mesh[k][1]);
    }
    return result;
  }

  // Which part of each dim a device holds, and how many parts there are.
  function parts(dims, at) {
    const sizes = Object.fromEntries(mesh);
    return dims.map((axes) => axes.reduce(([index, count], axis) => [index * sizes[axis] + at[axis], count * sizes[axis]], [0, 1]));
  }

  function color(index, count) {
    if (count === 1) return getComputedStyle(document.documentElement).getPropertyValue("--compute");
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    // Few parts get hues far apart; many get a ramp, on which neighbours look alike but order can be seen.
    const hue = count <= 8 ? (index * 360) / count + 210 : 210 + (300 * index) / count;
    return `hsl(${hue % 360} 55% ${(dark ? 42 : 52) + (count > 8 ? 10 * (index % 2) : 0)}%)`;
  }

  // The topology: the two innermost physical axes are a grid, the others lay grids side by side.
  const shown = { dims: null, axis: mesh[0][0], node: null };
  const canvas = byId("devices");
  let cells = [];

  function layOut(width) {
    const physical = data.physical;
    const inner = physical.slice(-2);
    let columns = inner[inner.length - 1].size;
    let rows = inner.length > 1 ? inner[0].size : 1;
    if (inner.length === 1 && columns > 16) { rows = Math.ceil(columns / 16); columns = 16; }
    const perPanel = inner.reduce((product, axis) => product * axis.size, 1);
    const panels = Math.max(1, Math.min(total / perPanel, Math.floor(data.drawn / perPanel) || 1));
    // The largest cells with which all panels take no more height than width.
    let best = null;
    for (let across = 1; across <= panels; across += 1) {
      const down = Math.ceil(panels / across);
      const cell = Math.min((width - 10 * across) / (across * columns), (0.8 * width - 22 * down) / (down * rows), 28);
      if (best === null || cell > best.cell) best = { cell, across, down };
    }
    const cell = Math.max(best.cell, 1);
    cells = [];
    const drawn = Math.min(total, panels * perPanel);
    for (let device = 0; device < drawn; device += 1) {
      const panel = Math.floor(device / perPanel);
      const index = device % perPanel;
      cells.push({
        device,
        x: (panel % best.across) * (columns * cell + 10) + (index % columns) * cell,
        y: Math.floor(panel / best.across) * (rows * cell + 22) + 16 + Math.floor(index / columns) * cell,
        size: cell,
      });
    }
    return { panels, perPanel, across: best.across, panelWidth: columns * cell + 10, panelHeight: rows * cell + 22, height: best.down * (rows * cell + 22) };
  }

  function panelName(panel) {
    const outer = data.physical.slice(0, -2);
    const names = [];
    for (let k = outer.length - 1; k >= 0; k -= 1) {
      names.unshift(`${outer[k].name} ${panel % outer[k].size}`);
      panel = Math.floor(panel / outer[k].size);
    }
    return names.join(", ");
  }

  function shardOf(at) {
    if (!shown.dims) {
      const size = Object.fromEntries(mesh)[shown.axis];
      return [at[shown.axis], size];
    }
    return parts(shown.dims, at).reduce(([index, count], [i, n]) => [index * n + i, count * n], [0, 1]);
  }

  function prepare(target, width, height) {
    const ratio = window.devicePixelRatio || 1;
    target.width = Math.round(width * ratio);
    target.height = Math.round(height * ratio);
    target.style.width = `${width}px`;
    target.style.height = `${height}px`;
    const context = target.getContext("2d");
    context.scale(ratio, ratio);
    return context;
  }

  function draw() {
    const width = Math.min(canvas.parentElement.clientWidth, matchMedia("(max-width: 860px)").matches ? 190 : 420);
    const layout = layOut(width);
    const context = prepare(canvas, width, layout.height);
    const style = getComputedStyle(document.documentElement);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = style.getPropertyValue("--dim");
    for (let panel = 0; panel < layout.panels && layout.panels > 1 && layout.panelWidth > 40; panel += 1) {
      context.fillText(panelName(panel), (panel % layout.across) * layout.panelWidth, Math.floor(panel / layout.across) * layout.panelHeight + 11);
    }
    for (const cell of cells) {
      context.fillStyle = color(...shardOf(coordinates(place[cell.device])));
      const gap = cell.size > 4 ? 1 : 0;
      context.fillRect(cell.x, cell.y, cell.size - gap, cell.size - gap);
    }
    describe();
  }

  function describe() {
    const physical = data.physical.map((axis) => `${axis.name} ${axis.size}${axis.wrap ? " (ring)" : ""}`).join(", ");
    const rest = cells.length < total ? ` The first ${cells.length} of ${total} devices are drawn.` : "";
    let text = `${physical}. Devices of one colour have the same place on ${shown.axis}.${rest}`;
    if (shown.dims) {
      const count = shardOf(coordinates(0))[1];
      text = count === 1 ? `Every device holds all of ${shown.node.label}.` : `${shown.node.label}: ${count} parts on ${total} devices; devices of one colour hold the same part.${rest}`;
    }
    byId("devices-note").textContent = text;
    for (const button of byId("axes").children) {
      button.setAttribute("aria-pressed", String(!shown.dims && button.dataset.axis === shown.axis));
    }
  }

  for (const [axis, size] of mesh) {
    const button = create("button", `${axis} (${size})`);
    button.type = "button";
    button.dataset.axis = axis;
    button.addEventListener("click", () => { shown.axis = axis; pick(null); });
    byId("axes").append(button);
  }

  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const cell = cells.find((c) => x >= c.x && x < c.x + c.size && y >= c.y && y < c.y + c.size);
    if (!cell) { describe(); return; }
    const at = coordinates(place[cell.device]);
    let rest = cell.device;
    const physical = [...data.physical].reverse().map((axis) => {
      const here = rest % axis.size;
      rest = Math.floor(rest / axis.size);
      return `${axis.name} ${here}`;
    }).reverse().join(", ");
    let text = `Device ${cell.device} (${physical}): ${mesh.map(([axis]) => `${axis} ${at[axis]}`).join(", ")}`;
    if (shown.dims && shown.node.shape.length) {
      const slices = parts(shown.dims, at).map(([index, count], dim) => {
        const step = Math.ceil(shown.node.shape[dim] / count);
        return `${index * step}:${Math.min((index + 1) * step, shown.node.shape[dim])}`;
      });
      text += `; it holds [${slices.join(", ")}]`;
    }
    byId("devices-note").textContent = text;
  });
  canvas.addEventListener("pointerleave", describe);

  // The tensor itself: its two most split dims, cut where the plan cuts.
  function drawTensor() {
    const box = byId("tensor");
    box.hidden = !shown.dims || !shown.node.shape.length;
    if (box.hidden) return;
    const { node } = shown;
    const counts = parts(shown.dims, coordinates(0)).map(([, count]) => count);
    const order = counts.map((count, dim) => dim).sort((a, b) => counts[b] - counts[a] || b - a).slice(0, 2).sort((a, b) => a - b);
    const [rowDim, columnDim] = order.length > 1 ? order : [null, order[0]];
    const rows = rowDim === null ? 1 : counts[rowDim];
    const columns = counts[columnDim];
    const width = Math.min(box.clientWidth, 260);
    const height = rowDim === null ? 28 : 110;
    const context = prepare(byId("tensor-picture"), width, height);
    const drawnRows = Math.min(rows, 64);
    const drawnColumns = Math.min(columns, 64);
    for (let row = 0; row < drawnRows; row += 1) {
      for (let column = 0; column < drawnColumns; column += 1) {
        const index = rowDim === null ? column : Math.floor((row * rows) / drawnRows) * columns + Math.floor((column * columns) / drawnColumns);
        context.fillStyle = color(index, rows * columns);
        const [w, h] = [width / drawnColumns, height / drawnRows];
        context.fillRect(column * w, row * h, w - (w > 4 ? 1 : 0), h - (h > 4 ? 1 : 0));
      }
    }
    const say = (dim) => `dim ${dim} (${node.shape[dim]}) in ${counts[dim]}${shown.dims[dim].length ? ` by ${shown.dims[dim].join(", ")}` : ""}`;
    byId("tensor-note").textContent = `${node.name}, ${node.dtype}: ${rowDim === null ? "" : `down ${say(rowDim)}; `}across ${say(columnDim)}`;
  }

  function pick(node, row) {
    document.querySelectorAll("#tensors tr.picked").forEach((other) => other.classList.remove("picked"));
    if (row && node) row.classList.add("picked");
    shown.dims = node ? node.dims : null;
    shown.node = node;
    draw();
    drawTensor();
  }

  // The tree of modules. Only rows that are open exist, so that a page of 100,000 tensors opens at once.
  const body = document.querySelector("#tensors tbody");
  const open = new Set();
  const sorting = { key: null, down: true };
  const LIMIT = 2000;
  let wanted = "";
  let serial = 0;

  (function number(nodes) {
    for (const node of nodes) {
      node.id = (serial += 1);
      if (node.children) number(node.children);
    }
  })(data.trees);
  // Open at first what fits on a screen: level by level, smallest modules first.
  (function unfoldSome(rows, level) {
    const next = [];
    for (const node of level) {
      if (rows + node.children.length > 30) continue;
      rows += node.children.length;
      open.add(node.id);
      next.push(...node.children.filter((child) => child.children));
    }
    if (next.length) unfoldSome(rows, next);
  })(data.trees.length, data.trees.slice(0, 1));

  function matches(node) {
    return node.children ? node.children.some(matches) : node.name.toLowerCase().includes(wanted);
  }

  function sorted(nodes) {
    if (!sorting.key) return nodes;
    const sign = sorting.down ? -1 : 1;
    return [...nodes].sort((a, b) => (sorting.key === "label" ? a.label.localeCompare(b.label, undefined, { numeric: true }) : a[sorting.key] - b[sorting.key]) * sign);
  }

  function visible() {
    const rows = [];
    const found = { leaves: 0 };
    (function walk(nodes, level) {
      for (const node of sorted(nodes)) {
        if (wanted && !matches(node)) continue;
        if (!node.children) found.leaves += 1;
        if (rows.length < LIMIT) rows.push([node, level]);
        if (node.children && (wanted || open.has(node.id))) walk(node.children, level + 1);
      }
    })(data.trees, 1);
    return [rows, found.leaves];
  }

  // Where both parts of a refined axis split one dim, the axis itself: "model" for "model(8 of 16)", "model(2 of 16)".
  function axisWords(axes) {
    const part = /^(.+)\((\d+) of (\d+)(?:, (?:outer|inner))?\)$/;
    const words = [];
    for (const axis of axes) {
      const last = words.length ? part.exec(words[words.length - 1]) : null;
      const here = part.exec(axis);
      if (last && here && last[1] === here[1] && last[2] * here[2] === Number(here[3])) words[words.length - 1] = here[1];
      else words.push(axis);
    }
    return words;
  }

  function shapeCell(node) {
    const cell = create("td");
    node.shape.forEach((size, dim) => {
      if (dim) cell.append(" × ");
      const part = create("span", String(size), "dim");
      if (node.dims[dim].length) part.append("/", create("span", axisWords(node.dims[dim]).join("/"), "axes"));
      cell.append(part);
    });
    cell.append(create("span", ` ${node.shape.length ? "" : "scalar "}${node.dtype}${node.dims.some((axes) => axes.length) ? "" : ", whole"}`, "whole"));
    return cell;
  }

  function line(node, level) {
    const row = create("tr");
    row.tabIndex = -1;
    row.dataset.id = node.id;
    row.setAttribute("aria-level", level);
    const name = create("td");
    name.style.paddingLeft = `${(level - 1 + (node.children ? 0 : 1)) * 16}px`;
    const opened = Boolean(wanted) || open.has(node.id);
    if (node.children) name.append(create("span", opened ? "▾" : "▸", "twist"));
    const label = named(node.label, node.children ? "module" : "");
    name.append(label);
    if (node.repeats > 1) name.append(create("span", ` ×${node.repeats}`, "times"));
    row.append(name);
    if (node.children) {
      row.setAttribute("aria-expanded", String(opened));
      row.append(create("td"));
      row.addEventListener("click", () => toggle(node, row));
    } else {
      label.title = node.name;
      row.append(shapeCell(node));
      row.addEventListener("pointerenter", () => pick(node, row));
      row.addEventListener("click", () => { row.focus(); pick(node, row); });
    }
    for (const [key, text] of [["total", bytes(node.total)], ["device", bytes(node.device)], ["comm", seconds(node.comm)]]) {
      const cell = create("td", text, "n");
      cell.dataset.value = node[key];
      row.append(cell);
    }
    return row;
  }

  function render(focus) {
    const [rows, leaves] = visible();
    body.replaceChildren(...rows.map(([node, level]) => line(node, level)));
    const target = (focus && body.querySelector(`tr[data-id="${focus}"]`)) || body.firstElementChild;
    if (target) target.tabIndex = 0;
    if (focus && target) target.focus();
    byId("found").textContent = wanted ? `${leaves} found` : rows.length >= LIMIT ? `the first ${LIMIT} rows are shown` : "";
  }

  const nodes = new Map();
  (function index(list) {
    for (const node of list) {
      nodes.set(node.id, node);
      if (node.children) index(node.children);
    }
  })(data.trees);

  function toggle(node) {
    if (wanted) return;
    if (!open.delete(node.id)) open.add(node.id);
    render(node.id);
  }

  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    const node = nodes.get(Number(row.dataset.id));
    const moves = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling, Home: body.firstElementChild, End: body.lastElementChild };
    if (event.key in moves) {
      const next = moves[event.key];
      if (next) {
        row.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
        const there = nodes.get(Number(next.dataset.id));
        if (!there.children) pick(there, next);
      }
    } else if (node.children && (event.key === "Enter" || event.key === " " || (event.key === "ArrowRight") !== open.has(node.id))) {
      if (["Enter", " ", "ArrowRight", "ArrowLeft"].includes(event.key)) toggle(node);
      else return;
    } else return;
    event.preventDefault();
  });

  byId("search").addEventListener("input", (event) => {
    wanted = event.target.value.trim().toLowerCase();
    render();
  });
  byId("unfold").addEventListener("click", () => { nodes.forEach((node) => node.children && open.add(node.id)); render(); });
  byId("fold").addEventListener("click", () => { open.clear(); render(); });

  function mark(button, down) {
    for (const other of button.closest("tr").querySelectorAll("th")) other.removeAttribute("aria-sort");
    button.closest("th").setAttribute("aria-sort", down ? "descending" : "ascending");
  }

  for (const button of document.querySelectorAll("#tensors th button")) {
    button.addEventListener("click", () => {
      const key = button.dataset.sort;
      sorting.down = sorting.key === key ? !sorting.down : key !== "label";
      sorting.key = key;
      mark(button, sorting.down);
      render();
    });
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    table.querySelectorAll("th button").forEach((button, column) => {
      button.addEventListener("click", () => {
        const down = button.closest("th").getAttribute("aria-sort") === "ascending" || (!button.closest("th").hasAttribute("aria-sort") && button.closest("th").classList.contains("n"));
        const value = (row) => row.children[column].dataset.value ?? row.children[column].textContent;
        const rows = [...table.tBodies[0].rows].sort((a, b) => {
          const [x, y] = [value(a), value(b)];
          const order = Number.isNaN(Number(x)) ? x.localeCompare(y) : Number(x) - Number(y);
          return down ? -order : order;
        });
        table.tBodies[0].append(...rows);
        mark(button, down);
      });
    });
  }

  const all = byId("all-collectives");
  if (all) {
    const closed = all.textContent;
    all.addEventListener("click", () => {
      const opened = byId("collectives").classList.toggle("all");
      all.setAttribute("aria-expanded", String(opened));
      all.textContent = opened ? "Show the first 20" : closed;
    });
  }

  function redraw() { draw(); drawTensor(); }
  window.addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  window.addEventListener("beforeprint", redraw);
  render();
  redraw();
})();
