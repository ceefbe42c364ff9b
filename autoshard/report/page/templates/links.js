// One line of devices for each physical axis, its links as thick and as red as they are busy.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { byId, create, shape, seconds, bytes } = page;
  const holder = byId("torus");
  if (!holder || !data.links) return;
  const share = (link) => (data.step ? Math.min(1, link.seconds / data.step) : 0);

  function said(axis, link, from) {
    const where = axis.line ? `${axis.name} ${from} to ${link.to}` : `each device's link to the ${axis.kind} of ${axis.size} (${axis.name})`;
    const who = link.axes.length ? `busy ${seconds(link.seconds) || "0 s"} of a step (${(100 * share(link)).toFixed(1)} %) with ${link.axes.join(", ")}, which send ${bytes(link.bytes)} each way` : "no mesh axis passes it";
    return `Link ${where}: ${who}${link.waited_s ? `; compute waits for ${seconds(link.waited_s)} of it` : ""}`;
  }

  function drawn(axis, width) {
    const count = axis.line ? axis.size : Math.min(axis.size, 8);
    const left = 16, right = width - 16, gap = (right - left) / Math.max(1, count - 1);
    const high = axis.line && axis.links.length < axis.size ? 26 : 56, y = high - 13;
    const svg = shape("svg", { viewBox: `0 0 ${width} ${high}`, height: high, role: "group", "aria-label": `Links along ${axis.name}` });
    const x = (place) => left + place * gap;
    const seen = new Set();
    function add(path, link, from) {
      const text = said(axis, link, from), key = `${link.axes}/${link.seconds}`;
      const line = shape("path", {
        d: path, fill: "none", "stroke-width": 3 + 8 * share(link), role: "img", "aria-label": text, "data-share": share(link),
        style: `stroke: color-mix(in srgb, var(--c1) ${Math.round(100 * Math.sqrt(share(link)))}%, var(--c8))`,
      });
      // Links that are alike are reached once with the tab key.
      if (!seen.has(key)) line.setAttribute("tabindex", 0);
      seen.add(key);
      ["mouseenter", "focus", "click"].forEach((event) => line.addEventListener(event, () => { byId("link-pointed").textContent = text; }));
      svg.append(line);
    }
    if (axis.line) {
      axis.links.forEach((link, from) => {
        const wraps = from === axis.size - 1;
        add(wraps ? `M ${x(from)} ${y} C ${x(from)} 2, ${x(0)} 2, ${x(0)} ${y}` : `M ${x(from)} ${y} H ${x(from + 1)}`, link, from);
      });
    } else {
      const middle = (left + right) / 2;
      for (let place = 0; place < count; place += 1) add(`M ${x(place)} ${y} L ${middle} 8`, axis.links[0], place);
      svg.append(shape("rect", { x: middle - 26, y: 2, width: 52, height: 14, rx: 3 }));
      svg.append(shape("text", { x: middle, y: 13, "text-anchor": "middle" }, axis.kind));
    }
    for (let place = 0; place < count; place += 1) svg.append(shape("circle", { cx: x(place), cy: y, r: Math.min(6, gap / 3) }));
    return svg;
  }

  function draw() {
    const width = Math.max(240, Math.min(holder.clientWidth, 720));
    holder.replaceChildren(...data.links.physical.flatMap((axis) => [
      create("h3", `${axis.name}: ${axis.size} ${axis.kind === "network" ? "slices or islands" : "devices"} on a ${axis.kind}${axis.line && axis.links.length === axis.size ? ", in a ring" : ""}`),
      drawn(axis, width),
    ]));
  }
  window.addEventListener("resize", draw);
  window.addEventListener("beforeprint", draw);
  draw();
})();
