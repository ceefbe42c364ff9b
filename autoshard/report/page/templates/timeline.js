// The step in time: a row for what the device does and waits for, one for each link. Zoomed and moved by hand.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent).timeline;
  const { byId, seconds } = page;
  const canvas = byId("time");
  if (!canvas || !data) return;
  const ROW = 22, TITLE = 16, LEAST = 1e-5;
  const FILL = { compute: "--compute", "all-gather": "--c2", "reduce-scatter": "--c1", "all-reduce": "--c3", "all-to-all": "--c4", "collective-permute": "--c6", other: "--c5" };
  const view = { start: 0, length: data.end };
  let chosen = { row: 0, at: -1 }, dragged = null;
  data.rows.forEach((row) => row.spans.sort((a, b) => a[2] - b[2]));

  function limit() {
    view.length = Math.max(LEAST * data.end, Math.min(data.end, view.length));
    view.start = Math.max(0, Math.min(data.end - view.length, view.start));
  }

  // The longest form of a name that fits: whole, without the parenthesis, its last words. Nothing is clipped.
  function label(context, name, room) {
    const words = name.replace(/ \(.*\)$/, "").split(" ");
    const forms = [name, ...words.map((_, at) => words.slice(at).join(" "))];
    return forms.find((form) => context.measureText(form).width <= room) || "";
  }

  function draw() {
    limit();
    const ratio = window.devicePixelRatio || 1, width = canvas.parentElement.clientWidth, height = data.rows.length * (ROW + TITLE) + 18;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name);
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    const scale = width / view.length;
    data.rows.forEach((row, number) => {
      const y = number * (ROW + TITLE) + TITLE;
      context.fillStyle = color("--dim");
      context.fillText(row.name, 0, y - 4);
      context.fillStyle = color("--card");
      context.fillRect(0, y, width, ROW);
      row.spans.forEach(([name, kind, start, length], at) => {
        const x = (start - view.start) * scale, wide = length * scale;
        if (x > width || x + wide < 0) return;
        context.fillStyle = color(FILL[kind] || "--c5");
        context.fillRect(x, y, Math.max(wide - (wide > 3 ? 0.5 : 0), 0.5), ROW);
        const from = Math.max(x, 0), room = Math.min(x + wide, width) - from;
        const text = room > 20 ? label(context, data.names[name], room - 8) : "";
        if (text) {
          context.fillStyle = kind === "all-gather" ? "#000" : "#fff";
          context.fillText(text, from + 4, y + 15);
        }
        if (chosen.row === number && chosen.at === at) {
          context.strokeStyle = color("--ink");
          context.lineWidth = 2;
          context.strokeRect(Math.max(x, 1), y + 1, Math.max(Math.min(wide, width - Math.max(x, 1)) - 2, 2), ROW - 2);
        }
      });
    });
    context.fillStyle = color("--dim");
    context.fillText(seconds(view.start) || "0 s", 0, height - 4);
    context.textAlign = "right";
    context.fillText(seconds(view.start + view.length), width, height - 4);
  }

  function show(row, at) {
    chosen = { row, at };
    const [name, kind, start, length] = data.rows[row].spans[at];
    byId("time-note").textContent = `${data.names[name]}: ${seconds(length)} from ${seconds(start) || "0 s"} on (${data.rows[row].name}${kind === "compute" || row ? "" : "; compute waits"})`;
    draw();
  }

  function zoom(factor, middle = view.start + view.length / 2) {
    const part = (middle - view.start) / view.length;
    view.length = factor ? view.length / factor : data.end;
    limit();
    view.start = factor ? middle - part * view.length : 0;
    draw();
  }

  const moment = (event) => {
    const box = canvas.getBoundingClientRect();
    return view.start + view.length * (event.clientX - box.left) / box.width;
  };

  canvas.addEventListener("pointerdown", (event) => { dragged = { x: event.clientX, start: view.start }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointercancel", () => { dragged = null; });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    if (dragged && Math.abs(event.clientX - dragged.x) > 3) {
      view.start = dragged.start - (event.clientX - dragged.x) * view.length / box.width;
      draw();
      return;
    }
    const row = Math.floor((event.clientY - box.top) / (ROW + TITLE)), now = moment(event);
    const spans = data.rows[row]?.spans || [], slack = view.length / box.width;
    const at = spans.findIndex(([, , start, length]) => now >= start - slack && now <= start + Math.max(length, slack));
    if (at >= 0 && (at !== chosen.at || row !== chosen.row)) show(row, at);
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;  // the page itself scrolls with the bare wheel
    event.preventDefault();
    zoom(event.deltaY < 0 ? 1.25 : 0.8, moment(event));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const { row, at } = chosen, spans = data.rows[row].spans;
    const near = (other) => {
      const begin = at < 0 ? 0 : spans[at][2], list = data.rows[other].spans;
      return Math.max(0, list.findLastIndex(([, , start]) => start <= begin));
    };
    const moves = {
      ArrowRight: () => show(row, Math.min(spans.length - 1, at + 1)), ArrowLeft: () => show(row, Math.max(0, at - 1)),
      ArrowDown: () => { const next = Math.min(data.rows.length - 1, row + 1); show(next, near(next)); },
      ArrowUp: () => { const next = Math.max(0, row - 1); show(next, near(next)); },
      Home: () => show(row, 0), End: () => show(row, spans.length - 1),
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]();
    const [, , start, length] = data.rows[chosen.row].spans[chosen.at];
    if (start + length > view.start + view.length || start < view.start) { view.start = start - view.length / 3; draw(); }
  });
  for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => zoom(Number(button.dataset.zoom)));
  window.addEventListener("resize", draw);
  window.addEventListener("beforeprint", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
