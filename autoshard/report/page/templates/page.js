"use strict";
// What all pages share: making elements, numbers as people read them, and a plot of points to the scale of factors.
const page = (() => {
  const byId = (id) => document.getElementById(id);
  // The parser knows the name of SVG's namespace, so that no address need stand in a page that asks for none.
  const SVG = Object.assign(document.createElement("template"), { innerHTML: "<svg></svg>" }).content.firstChild.namespaceURI;

  function create(tag, text, className) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  }

  function shape(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // Names break after dots and underscores, not within words.
  function named(text, className) {
    const element = create("bdi", undefined, className);
    text.split(/(?<=[._/])(?=[^._/])/).forEach((part, index) => {
      if (index) element.append(create("wbr"));
      element.append(part);
    });
    return element;
  }

  function bytes(value) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
    return unit ? `${value.toFixed(2)} ${units[unit]}` : `${Math.round(value)} B`;
  }

  function seconds(value) {
    for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]]) {
      if (value >= scale) return `${Number((value / scale).toPrecision(3))} ${unit}`;
    }
    return value ? `${Number((value / 1e-12).toPrecision(3))} ps` : "";
  }

  // 1.5e12 -> 1.5 T; nothing for what is not known.
  function count(value, unit = "") {
    if (value === null || value === undefined || !Number.isFinite(value)) return "";
    const prefixes = ["", "k", "M", "G", "T", "P", "E"];
    let number = value, prefix = 0;
    while (Math.abs(number) >= 1000 && prefix < prefixes.length - 1) { number /= 1000; prefix += 1; }
    return `${Number(number.toPrecision(3))} ${prefixes[prefix]}${unit}`.trim();
  }

  const short = (value) => (value === null ? "" : Math.abs(value) >= 1e4
    ? Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value)
    : String(Number(value.toPrecision(4))));

  // Marks at 1, 2, 5 and so on of a scale by factors.
  function marks(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.ceil(Math.log10(high)); power += 1) {
      [1, 2, 5].forEach((digit) => { const at = digit * 10 ** power; if (at >= low && at <= high) found.push(at); });
    }
    return found.length > 8 ? found.filter((at) => /^1/.test(at.toExponential())) : found;
  }

  const MARGIN = { left: 64, right: 18, top: 14, bottom: 40 };

  // Points {id, x, y, said, className, fill, radius} and lines {points, className, text}, both to the scale of factors.
  function scatter(holder, { points, lines = [], label, xTitle, xText = short, yText = short, ranges, height = 340, onPoint }) {
    const width = Math.max(280, holder.clientWidth);
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label, style: `height: ${height}px` });
    holder.replaceChildren(svg);
    if (!points.length) return;
    const around = (values) => [Math.min(...values) / 1.15, Math.max(...values) * 1.15];
    const [x0, x1] = ranges ? ranges.x : around(points.map((each) => each.x));
    const [y0, y1] = ranges ? ranges.y : around(points.map((each) => each.y));
    const x = (value) => MARGIN.left + (width - MARGIN.left - MARGIN.right) * Math.log(value / x0) / Math.log(x1 / x0);
    const y = (value) => height - MARGIN.bottom - (height - MARGIN.top - MARGIN.bottom) * Math.log(value / y0) / Math.log(y1 / y0);
    marks(x0, x1).forEach((at) => {
      svg.append(shape("line", { x1: x(at), x2: x(at), y1: MARGIN.top, y2: height - MARGIN.bottom }));
      svg.append(shape("text", { x: x(at), y: height - MARGIN.bottom + 16, "text-anchor": "middle" }, xText(at)));
    });
    marks(y0, y1).forEach((at) => {
      svg.append(shape("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(at), y2: y(at) }));
      svg.append(shape("text", { x: MARGIN.left - 6, y: y(at) + 4, "text-anchor": "end" }, yText(at)));
    });
    svg.append(shape("text", { x: width - MARGIN.right, y: height - 6, "text-anchor": "end" }, xTitle));
    for (const line of lines) {
      svg.append(shape("polyline", { points: line.points.map(([a, b]) => `${x(a)},${y(b)}`).join(" "), class: line.className || "" }));
      if (line.text) {
        const [a, b] = line.points.at(-1);
        svg.append(shape("text", { x: x(a) - 4, y: y(b) - 6, "text-anchor": "end" }, line.text));
      }
    }
    points.forEach((each) => {
      const dot = shape("circle", {
        cx: x(each.x), cy: y(each.y), r: each.radius || 6, tabindex: 0, role: "img", "data-id": each.id,
        "aria-label": each.said, class: each.className || "", style: `fill: ${each.fill}`,
      });
      ["mouseenter", "focus", "click"].forEach((event) => dot.addEventListener(event, () => onPoint(each.id)));
      svg.append(dot);
    });
  }

  function legend(holder, entries) {
    holder.replaceChildren(...entries.map(([text, fill]) => {
      const entry = create("span"), square = create("i");
      square.style.background = fill;
      entry.append(square, text);
      return entry;
    }));
  }

  // The head of a table: [name, key] of each column, of which those with a key can be sorted by.
  function sortHead(row, columns, order, onSort) {
    row.replaceChildren(...columns.map(([name, key]) => {
      if (key === null) return create("th", name);
      const cell = create("th"), button = create("button", name);
      button.type = "button";
      if (order.key === key) cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      button.addEventListener("click", () => {
        onSort({ key, down: order.key === key && !order.down });
        [...row.querySelectorAll("button")].find((each) => each.textContent === name).focus();
      });
      cell.append(button);
      return cell;
    }));
  }

  return { byId, create, shape, named, bytes, seconds, count, short, scatter, legend, sortHead };
})();
