// Elements that the views are made of. Text goes in as text nodes alone: nothing that a user or a
// model says is read as HTML.

const SVG = new Set(["svg", "line"]);

/** An element: `on...` are listeners, `style` sets properties, false and null are left out. */
export function element(name, attributes = {}, ...children) {
  const made = SVG.has(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) {
      made.addEventListener(key.slice(2), value);
    } else if (key === "style") {
      for (const [property, own] of Object.entries(value)) made.style.setProperty(property, own);
    } else if (value !== false && value != null) {
      made.setAttribute(key, value === true ? "" : value);
    }
  }
  made.append(...children.flat().filter((child) => child != null && child !== false));
  return made;
}

/** A probability as people read it. */
export function percent(probability) {
  if (probability > 0.999 && probability < 1) return "> 99.9%";
  if (probability > 0 && probability < 1e-6) return "< 0.0001%";
  const digits = probability > 0 && probability < 0.001 ? 4 : 1;
  return `${(100 * probability).toFixed(digits)}%`;
}

/** A number with a minus sign, which is as wide as a plus, in place of a hyphen. */
export function signed(number, digits = 3) {
  return number.toFixed(digits).replace("-", "−");
}

/** The lines of a text that say something. */
export function lines(text) {
  return text.split("\n").map((line) => line.trim()).filter(Boolean);
}

export function capitalized(text) {
  return text[0].toUpperCase() + text.slice(1);
}

export function group(...children) {
  return element("div", {}, ...children);
}

/** A part of an answer with its heading. */
export function part(title, ...children) {
  return element("section", {}, element("h3", {}, title), ...children);
}

export function note(text) {
  return element("p", { class: "hint" }, text);
}

/**
 * A list of bars: { name, share, text, best }, `share` in 0 to 1, or -1 to 1 where `isSigned`,
 * which puts nought in the middle. `name` may be an element.
 */
export function bars(rows, { isSigned = false } = {}) {
  const items = rows.map(({ name, share, text, best }) => {
    const side = share < 0 ? "against" : "for";
    const size = { "--share": Math.min(1, Math.abs(share)) };
    const fill = element("span", { class: `fill ${isSigned ? side : ""}`, style: size });
    return element(
      "li",
      { class: best ? "best" : null },
      element("span", { class: "name", dir: "auto" }, name),
      element("span", { class: isSigned ? "track signed" : "track", "aria-hidden": "true" }, fill),
      element("span", { class: "value" }, text),
    );
  });
  return element("ol", { class: "bars" }, items);
}

/** The bar of a probability. */
export function chance(name, probability, best = false) {
  return { name, share: probability, text: percent(probability), best };
}

/**
 * A text with marks on spans of it, which are in order: `mark(span, words)` makes the element.
 * The server counts characters, JavaScript units of UTF-16: an emoji is one of the former.
 */
export function marked(text, spans, mark) {
  const characters = [...text];
  const children = [];
  let place = 0;
  for (const span of spans) {
    if (span.start < place) continue;
    children.push(characters.slice(place, span.start).join(""));
    children.push(mark(span, characters.slice(span.start, span.end).join("")));
    place = span.end;
  }
  children.push(characters.slice(place).join(""));
  return element("p", { class: "text", dir: "auto" }, children);
}

/**
 * A table of numbers as colours, in a box of its own that scrolls. `rows` and `columns` are texts
 * or elements, `shade` gives 0 to 1 for a number; with `digits` the numbers are shown as well.
 */
export function heatTable({ caption, rows, columns, values, shade, digits = null }) {
  const head = columns.map((name) => element("th", { scope: "col" }, element("span", {}, name)));
  const body = values.map((numbers, row) =>
    element(
      "tr",
      {},
      element("th", { scope: "row", dir: "auto" }, rows[row]),
      numbers.map((number) => {
        const told = signed(number, digits ?? 3);
        const shown = element("span", { class: digits === null ? "unseen" : null }, told);
        return element("td", { style: { "--share": shade(number) }, title: told }, shown);
      }),
    ),
  );
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element(
      "table",
      { class: digits === null ? "heat small" : "heat" },
      element("caption", {}, caption),
      element("thead", {}, element("tr", {}, element("td", {}), head)),
      element("tbody", {}, body),
    ),
  );
}

/** Copy a text and say so on the button; `from` is the element that holds the text. */
export async function copy(button, text, from) {
  const title = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // without HTTPS browsers give no clipboard: the reader's own Ctrl C remains
    if (from) getSelection().selectAllChildren(from);
    button.textContent = from ? "Selected: press Ctrl C" : "Copy it from the address bar";
  }
  setTimeout(() => (button.textContent = title), 2000);
}

/**
 * A field of a form. `spec`: { name, label, kind, options, hint, placeholder, rows }, of the kinds
 * line, area, choice and select; `changed(value, isChosen)` is told of each edit.
 */
export function field(spec, value, changed) {
  const id = `field-${spec.name}`;
  const hint = spec.hint && element("span", { class: "hint", id: `${id}-hint` }, spec.hint);
  const described = hint ? `${id}-hint` : null;
  if (spec.kind === "choice") {
    const choices = spec.options.map(([own, title]) =>
      element(
        "label",
        {},
        element("input", {
          type: "radio",
          id: `${id}-${own}`,
          name: spec.name,
          value: own,
          checked: own === value,
          onchange: () => changed(own, true),
        }),
        element("span", {}, title),
      ),
    );
    const legend = element("legend", {}, spec.label);
    const group = element("div", { class: "choices" }, choices);
    return element("fieldset", { "aria-describedby": described }, legend, group, hint);
  }
  const shared = { id, name: spec.name, "aria-describedby": described };
  let control;
  if (spec.kind === "select") {
    control = select(shared, spec.options, value, (chosen) => changed(chosen, true));
  } else {
    const isLine = spec.kind === "line";
    control = element(isLine ? "input" : "textarea", {
      ...shared,
      style: { "--rows": spec.rows ?? 4 },
      dir: "auto",
      placeholder: spec.placeholder,
      spellcheck: "false",
      autocomplete: "off",
      oninput: (event) => changed(event.target.value, false),
    });
    control.value = value;
  }
  return element(
    "div",
    { class: "field" },
    element("label", { for: id }, spec.label),
    control,
    spec.insert && insertButton(spec.insert, control, changed),
    hint,
  );
}

/** A button that writes some words at the cursor. */
function insertButton(words, control, changed) {
  const insert = () => {
    control.setRangeText(words, control.selectionStart, control.selectionEnd, "end");
    changed(control.value, false);
    control.focus();
  };
  const shared = { type: "button", class: "quiet small", onclick: insert };
  return element("button", shared, `Insert ${words}`);
}

/** A select; `options` are [value, title]. */
export function select(attributes, options, value, changed) {
  const made = element(
    "select",
    { ...attributes, onchange: (event) => changed(event.target.value) },
    options.map(([own, title]) => element("option", { value: own }, title)),
  );
  made.value = value;
  return made;
}

/** A select in a row, with its label before it. */
export function labelledSelect(id, label, options, value, changed) {
  return element(
    "div",
    { class: "field" },
    element("label", { for: id }, label),
    select({ id }, options, value, changed),
  );
}
