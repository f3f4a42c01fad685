// What is inside a model: tokens with their places, attention, and vectors, which are compared here
// in the browser.

import {
  bars, element, group, heatTable, labelledSelect, lines, marked, note, part, percent, signed,
} from "./elements.js";

const ROW = 32; // pixels between two tokens of the lines
const FAINT = 0.02; // weights below are not drawn
const MOST = 64; // tokens of which the server tells the attention
const FOUND = 20; // lines of a search that are shown

export const tokens = {
  id: "tokens",
  title: "Tokens",
  about: "The pieces that a model reads in place of a text: their numbers, and where they stand.",
  needs: ["embed"],
  fields: () => [{ name: "text", label: "Text", kind: "area" }],
  examples: () => [
    { text: "Unbelievably, the antidisestablishmentarians won." },
    { text: "Café, naïve, 😀 and 東京." },
  ],
  async answer({ ask, values, model }) {
    const [found] = (await ask("v1/tokenize", { text: values.text })).answers;
    const placed = found.filter((token) => token.start !== null);
    const marks = new Map();
    const text = marked(values.text, placed, (token, said) => {
      const mark = element("span", { class: "place" }, said);
      marks.set(token, mark);
      return mark;
    });
    const chips = found.map((token) => chip(token, marks.get(token)));
    const told = `${found.length} tokens, of which this model reads ${model.max_tokens} at once`;
    return group(
      part("Text", text, note("Point at a token, or go to it by Tab: its characters are marked.")),
      part(told, element("ul", { class: "chips" }, chips)),
    );
  },
};

/** A token with its number and place, which marks its characters while it is looked at. */
function chip({ token, id, start, end }, mark) {
  const place = start === null ? "none" : `${start}–${end}`;
  const look = (isOn) => () => mark?.classList.toggle("on", isOn);
  const button = element(
    "button",
    {
      type: "button",
      class: "chip",
      "aria-label": `${token}, id ${id}, characters ${place}`,
      onmouseenter: look(true),
      onmouseleave: look(false),
      onfocus: look(true),
      onblur: look(false),
    },
    element("span", { class: "piece" }, token),
    element("span", { class: "small" }, `${id}`),
    element("span", { class: "small" }, place),
  );
  return element("li", {}, button);
}

const VIEWS = [
  ["lines", "Lines"],
  ["matrix", "Matrix"],
  ["rollout", "Rollout"],
];

export const attention = {
  id: "attention",
  title: "Attention",
  about: "Which tokens each token reads, layer by layer. Click a token to put [MASK] in its place.",
  needs: ["embed"],
  fields: () => [
    { name: "text", label: "Text", kind: "area" },
    { name: "view", label: "Show as", kind: "choice", options: VIEWS, initial: "lines" },
  ],
  hidden: ["layer", "head", "masked"], // parts of the state that are set in the answer
  examples: () => [
    { text: "The cat sat on the mat because it was warm." },
    { text: "A fine film, warm and wise.", view: "matrix" },
    { text: "Two hours of rain would have been more fun.", view: "rollout" },
  ],
  async answer({ ask, values, change, model }) {
    const masked = (values.masked ?? "").split(",").filter(Boolean).map(Number);
    const [found] = (await ask("v1/attention", { text: values.text, masked })).answers;
    const toggle = (number) => {
      const others = masked.filter((own) => own !== number);
      change({ masked: (others.length < masked.length ? others : [...masked, number]).join(",") });
    };
    const last = found.tokens.length - 1;
    const buttons = found.tokens.map((token, number) =>
      tokenButton(token, {
        id: `token-${model.id}-${number}`,
        isMasked: masked.includes(number),
        onclick: number > 0 && number < last ? () => toggle(number) : null,
      }),
    );
    const isCut = found.tokens.length === MOST && note(`The first ${MOST} tokens, no more.`);
    if (values.view === "rollout") return group(rolledOut(found, buttons), isCut);
    const chosen = chooseHead(found.weights, values);
    const shown = values.view === "matrix" ? matrix : linesBetween;
    return group(
      headControls(found.weights, chosen, change, model),
      shown(found.tokens, buttons, chosen.weights),
      isCut,
    );
  },
};

function tokenButton(token, { id, isMasked, onclick }) {
  const title = isMasked ? "Put the token back" : "Put [MASK] in its place";
  return element(
    "button",
    {
      type: "button",
      id,
      class: "token",
      title: onclick && title,
      "aria-pressed": onclick && String(isMasked),
      "aria-disabled": onclick ? null : "true",
      onclick: onclick ?? (() => {}),
    },
    token,
  );
}

/** The layer and head asked for, as far as the model has them, and their weights [T, T]. */
function chooseHead(layers, values) {
  const layer = Math.min(Number(values.layer) || layers.length, layers.length);
  const heads = layers[layer - 1];
  const head = Math.min(Number(values.head) || 0, heads.length);
  return { layer, head, weights: head ? heads[head - 1] : mean(heads) };
}

function mean(heads) {
  return heads[0].map((row, number) =>
    row.map((_, column) => {
      const sum = heads.reduce((total, head) => total + head[number][column], 0);
      return sum / heads.length;
    }),
  );
}

function headControls(layers, { layer, head }, change, model) {
  const numbered = (count) => Array.from({ length: count }, (_, k) => [`${k + 1}`, `${k + 1}`]);
  const heads = [["0", "mean of all"], ...numbered(layers[0].length)];
  const set = (name) => (value) => change({ [name]: value });
  return element(
    "div",
    { class: "row" },
    labelledSelect(
      `layer-${model.id}`, "Layer", numbered(layers.length), `${layer}`, set("layer"),
    ),
    labelledSelect(`head-${model.id}`, "Head", heads, `${head}`, set("head")),
  );
}

/** Two columns of the tokens: each on the left reads those on the right that lines lead to. */
function linesBetween(names, buttons, weights) {
  const height = names.length * ROW;
  const middle = (number) => (number + 0.5) * ROW;
  const drawn = weights.map((row, from) =>
    row.map((weight, to) =>
      weight < FAINT
        ? null
        : element("line", {
            x1: 0,
            y1: middle(from),
            x2: 100,
            y2: middle(to),
            style: { "--share": weight },
          }),
    ),
  );
  const targets = names.map((name) => element("li", {}, element("span", { class: "token" }, name)));
  const picture = element(
    "svg",
    {
      viewBox: `0 0 100 ${height}`,
      preserveAspectRatio: "none",
      height,
      role: "img",
      "aria-label": "Lines from each token to those that it reads",
    },
    drawn.flat(),
  );
  const readout = element("p", { class: "hint", "aria-live": "polite" });
  const box = element("div", { class: "lines" });
  const look = (from) => {
    box.classList.toggle("looking", from !== null);
    drawn.flat().forEach((line) => line?.classList.remove("on"));
    drawn[from]?.forEach((line) => line?.classList.add("on"));
    targets.forEach((target, to) => {
      target.style.setProperty("--share", from === null ? 0 : weights[from][to]);
    });
    readout.textContent = from === null ? AT_REST : strongest(names, weights, from);
  };
  const sources = buttons.map((button, from) =>
    element(
      "li",
      {
        onmouseenter: () => look(from),
        onmouseleave: () => look(null),
        onfocusin: () => look(from),
        onfocusout: () => look(null),
      },
      button,
    ),
  );
  box.append(element("ul", {}, sources), picture, element("ul", {}, targets));
  look(null);
  return group(box, readout);
}

const AT_REST = "Left reads right. Point at a token on the left, or go to it by Tab.";

/** What a token reads most, in words. */
function strongest(names, weights, from) {
  const order = weights[from].map((weight, to) => ({ weight, name: names[to] }));
  order.sort((one, other) => other.weight - one.weight);
  const told = order.slice(0, 3).map(({ weight, name }) => `${name} ${percent(weight)}`);
  return `${names[from]} reads ${told.join(", ")}`;
}

function matrix(names, buttons, weights) {
  const most = Math.max(...weights.flat());
  const table = heatTable({
    caption: "Rows read columns",
    rows: buttons,
    columns: names,
    values: weights,
    shade: (weight) => weight / most,
  });
  return group(table, note(`The strongest is ${percent(most)}; a row sums to 100%.`));
}

function rolledOut({ rollout }, buttons) {
  const most = Math.max(...rollout);
  const rows = rollout.map((share, number) => ({
    name: buttons[number],
    share: share / most,
    text: percent(share),
  }));
  const told =
    "Attention rollout: how much attention may have carried from a token to [CLS] through all" +
    " layers. The length of a bar is relative to the longest.";
  return part("Each token's share in [CLS]", bars(rows), note(told));
}

const SENTENCES = [
  "A man is playing a guitar.",
  "Someone plays an instrument.",
  "The cat sleeps on the sofa.",
  "A kitten is taking a nap.",
  "Shares fell sharply on Monday.",
].join("\n");

const QUESTIONS = [
  "How do I reset my password?",
  "Where can I download my invoice?",
  "How long does delivery take?",
  "Can I send a broken lamp back?",
  "Do you ship to other countries?",
].join("\n");

export const similarity = {
  id: "similarity",
  title: "Similarity",
  about: "How alike sentences are by the cosine of their vectors, each with every other.",
  needs: ["embed"],
  fields: () => [{ name: "texts", label: "Sentences, one a line", kind: "area", rows: 8 }],
  examples: () => [{ texts: SENTENCES }, { texts: QUESTIONS }],
  async answer({ ask, values }) {
    const texts = lines(values.texts);
    if (texts.length < 2) throw new Error("Write two sentences or more, one a line.");
    const vectors = await unitVectors(ask, texts);
    const cosines = vectors.map((one) => vectors.map((other) => dot(one, other)));
    const pairs = cosines.flatMap((row, from) =>
      row.slice(from + 1).map((cosine, step) => ({ from, to: from + 1 + step, cosine })),
    );
    pairs.sort((one, other) => other.cosine - one.cosine);
    const lowest = pairs.at(-1).cosine;
    const table = heatTable({
      caption: "Cosines",
      rows: texts.map((text, number) => `${number + 1} ${text}`),
      columns: texts.map((_, number) => `${number + 1}`),
      values: cosines,
      shade: (cosine) => (lowest < 1 ? Math.min(1, (cosine - lowest) / (1 - lowest)) : 1),
      digits: 2,
    });
    const [{ from, to, cosine }] = pairs;
    return group(
      table,
      note(`The faintest is the lowest, ${signed(lowest, 2)}.`),
      part(
        `Most alike: ${from + 1} and ${to + 1}, ${signed(cosine)}`,
        [from, to].map((number) => element("p", { class: "text", dir: "auto" }, texts[number])),
      ),
    );
  },
};

export const search = {
  id: "search",
  title: "Search",
  about: "Lines that mean the same as a question, by the cosine of their vectors.",
  needs: ["embed"],
  fields: () => [
    { name: "query", label: "Look for", kind: "line" },
    { name: "texts", label: "Lines to search", kind: "area", rows: 8 },
  ],
  examples: () => [
    { query: "I forgot my login", texts: QUESTIONS },
    { query: "a sleeping animal", texts: SENTENCES },
  ],
  async answer({ ask, values }) {
    const texts = lines(values.texts);
    if (!values.query.trim() || !texts.length) {
      throw new Error("Write what to look for, and lines to search.");
    }
    const [query, ...vectors] = await unitVectors(ask, [values.query, ...texts]);
    const found = vectors.map((vector, number) => ({
      text: texts[number],
      cosine: dot(query, vector),
    }));
    found.sort((one, other) => other.cosine - one.cosine);
    const rows = found.slice(0, FOUND).map(({ text, cosine }, rank) => ({
      name: text,
      share: Math.max(0, cosine),
      text: signed(cosine),
      best: rank === 0,
    }));
    const more = texts.length > FOUND && note(`The first ${FOUND} of ${texts.length} lines.`);
    return part("Nearest first", bars(rows), more);
  },
};

/** Vectors of length 1. */
async function unitVectors(ask, texts) {
  const { answers } = await ask("v1/embed", { text: texts });
  return answers.map(({ vector }) => {
    const length = Math.sqrt(dot(vector, vector)) || 1;
    return vector.map((number) => number / length);
  });
}

/** The sum of products of two vectors of one model. */
function dot(one, other) {
  let sum = 0;
  for (let k = 0; k < one.length; k++) sum += one[k] * other[k];
  return sum;
}
