// The calculator of memory.md: looks up what `lce_jax.explain` says (memory-numbers.js) for what the reader chooses.
"use strict";

function formatted(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = bytes;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function fill(select, values, chosen) {
  select.replaceChildren();
  for (const value of values) {
    const shown = typeof value === "number" ? value.toLocaleString("en-US") : value;
    select.add(new Option(shown, value, value === chosen, value === chosen));
  }
}

function show(form, body) {
  const chosen = ["model", "tokens", "shards"].map((name) => form.elements[name].value).join("/");
  const bytes = MEMORY.bytes[chosen];
  body.replaceChildren(
    ...MEMORY.ways.map((way, i) => {
      const row = document.createElement("tr");
      for (const text of [way, formatted(bytes[2 * i]), formatted(bytes[2 * i + 1])]) {
        row.append(Object.assign(document.createElement("td"), { textContent: text }));
      }
      return row;
    }),
  );
}

const form = document.getElementById("memory");
const body = document.querySelector("#memory-table tbody");
fill(form.elements.model, MEMORY.model, "qwen3-8b");
fill(form.elements.tokens, MEMORY.tokens, 8192);
fill(form.elements.shards, MEMORY.shards, 1);
form.addEventListener("change", () => show(form, body));
show(form, body);
