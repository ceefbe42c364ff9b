// One alternative that is known already, beside the plan: its time and its memory, as bars and in words.
(() => {
  const { step, peak, limit, perElement, alternatives } = JSON.parse(document.getElementById("data").textContent).whatIf;
  const { byId, create, bytes, seconds } = page;
  const choice = byId("alternative");
  if (!choice) return;

  function bar(title, own, other, text, over) {
    const box = create("div", undefined, "what"), most = Math.max(own, other || 0, over || 0) || 1;
    box.append(create("h3", title));
    for (const [name, value] of [["this plan", own], ["the other", other]]) {
      const row = create("div", undefined, "what-row"), track = create("span", undefined, "track"), fill = create("span");
      fill.style.width = `${100 * (value || 0) / most}%`;
      fill.style.background = name === "this plan" ? "var(--compute)" : "var(--c2)";
      track.append(fill);
      if (over) {
        const mark = create("span", undefined, "over");
        mark.style.left = `${100 * over / most}%`;
        mark.title = `the limit, ${text(over)}`;
        track.append(mark);
      }
      row.append(create("span", name), track, create("span", value === null ? "not known" : text(value), "n"));
      box.append(row);
    }
    return box;
  }

  const times = (ratio) => (Math.abs(ratio - 1) < 0.0005 ? "as long as" : ratio > 1 ? `${(100 * (ratio - 1)).toFixed(1)} % longer than` : `${(100 * (1 - ratio)).toFixed(1)} % less than`);

  function said(row) {
    const found = row.step_s ?? row.bound_s, words = row.step_s === null ? "at least " : row.foreseen ? "about " : "";
    const each = row.per_element_s && perElement && row.step_s !== null;
    const ratio = each ? row.per_element_s / perElement : found / step;
    const parts = [`It takes ${words}${seconds(found)} a step, ${words}${times(ratio)} this plan${each ? " for each element of a batch" : ""}.`];
    if (row.peak_bytes !== null) parts.push(`It holds ${words === "about " ? words : ""}${bytes(row.peak_bytes)} of a device${row.peak_bytes > limit ? `, ${bytes(row.peak_bytes - limit)} too much` : ""}.`);
    if (row.foreseen) parts.push("It was foreseen so, and not planned.");
    return parts.join(" ");
  }

  choice.addEventListener("change", () => {
    const row = alternatives[Number(choice.value)];
    if (choice.value === "" || !row) { byId("beside").replaceChildren(); return; }
    const found = row.step_s ?? row.bound_s;
    byId("beside").replaceChildren(
      bar(row.step_s === null ? "Step time; of the other what it takes at least" : "Step time", step, found, seconds),
      bar("Memory of one device at the peak", peak, row.peak_bytes, bytes, limit),
      create("p", said(row)), ...(row.why ? [create("p", row.why, "note")] : []),
    );
  });
})();
