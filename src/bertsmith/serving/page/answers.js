// What fine-tuned and pre-trained models answer: fill, classify, answer, tag, choose.
//
// A view: { id, title, about, needs, fields(model), examples(model), answer({ask, values, ...}) }.
// `ask(path, body)` is the server's answer by one model, `answer` makes an element of it.

import {
  bars, capitalized, chance, element, group, lines, marked, note, part, percent, signed,
} from "./elements.js";

const MASK = "[MASK]";
const WORDS_SHOWN = 12;

const EACH_OR_TOGETHER = [
  ["each", "Each by itself"],
  ["together", "All together"],
];

export const fill = {
  id: "fill",
  title: "Fill",
  about: "Write [MASK] where a word is missing, and see which words the model expects there.",
  needs: ["fill"],
  fields: () => [
    { name: "text", label: "Text with [MASK]", kind: "area", insert: MASK },
    {
      name: "mode",
      label: "Several masks",
      kind: "choice",
      options: EACH_OR_TOGETHER,
      initial: "each",
      hint: "Each by itself: the others stay masked. All together: words that fit each other.",
    },
    {
      name: "top",
      label: "Words to show",
      kind: "select",
      options: ["5", "10", "20"].map((number) => [number, number]),
      initial: "5",
    },
  ],
  examples: () => [
    { text: "The [MASK] sat on the mat." },
    { text: "Paris is the capital of [MASK]." },
    { text: "She put the [MASK] on the [MASK].", mode: "together" },
  ],
  async answer({ ask, values }) {
    const together = values.mode === "together";
    const body = { text: values.text, top: Number(values.top), together };
    const [found] = (await ask("v1/fill", body)).answers;
    return together
      ? filledTogether(values.text, found.fillings)
      : filledEach(values.text, found.masks);
  },
};

function filledEach(text, masks) {
  const best = masks.map((candidates) => candidates[0].token);
  const parts = masks.map((candidates, number) =>
    part(
      masks.length > 1 ? `Mask ${number + 1} of ${masks.length}` : "Likeliest words",
      bars(candidates.map((own, rank) => chance(own.token, own.probability, rank === 0))),
    ),
  );
  return group(filledText(text, best), parts);
}

function filledTogether(text, fillings) {
  const most = fillings[0].probability || 1;
  const rows = fillings.map(({ tokens, probability }, rank) => ({
    name: tokens.join(" … "),
    share: probability / most,
    text: percent(probability),
    best: rank === 0,
  }));
  return group(
    filledText(text, fillings[0].tokens),
    part("Likeliest fillings", bars(rows), note("The length of a bar is relative to the first.")),
  );
}

/** The text with words in place of its masks. */
function filledText(text, words) {
  const pieces = text.split(MASK);
  const children = pieces.flatMap((piece, number) =>
    number < words.length ? [piece, element("mark", {}, words[number])] : [piece],
  );
  return element("p", { class: "text large", dir: "auto" }, children);
}

export const classify = {
  id: "classify",
  title: "Classify",
  about: "The class, labels or score of a text, and which of its words mattered.",
  needs: ["classify", "score"],
  fields: (model) => [
    { name: "text", label: model.reads_pairs ? "First text" : "Text", kind: "area" },
    ...(model.reads_pairs ? [{ name: "text_pair", label: "Second text", kind: "area" }] : []),
    {
      name: "method",
      label: "Which words mattered",
      kind: "choice",
      options: [
        ["occlusion", "Occlusion"],
        ["gradient", "Gradient × input"],
        ["rollout", "Rollout"],
        ["none", "Off"],
      ],
      initial: "occlusion",
    },
    ...(model.methods[0] === "classify"
      ? [
          {
            name: "label",
            label: "Words for the label",
            kind: "select",
            options: [["", "the answer"], ...model.labels.map((label) => [label, label])],
            initial: "",
          },
        ]
      : []),
  ],
  examples: (model) =>
    model.reads_pairs
      ? [
          { text: "A man sings.", text_pair: "Someone is singing." },
          { text: "A dog runs in the park.", text_pair: "The animal is asleep." },
        ]
      : [
          { text: "A fine film, warm and wise." },
          { text: "Two hours of rain would have been more fun." },
          { text: "The plot is thin, but the acting is wonderful." },
        ],
  async answer({ ask, values }) {
    const texts = { text: values.text };
    if (values.text_pair !== undefined) texts.text_pair = values.text_pair;
    if (values.method === "none") {
      const [found] = (await ask("v1/classify", texts)).answers;
      return group(labelled(found));
    }
    const options = { method: values.method };
    if (values.label && values.method !== "rollout") options.label = values.label;
    const [found] = (await ask("v1/explain", { ...texts, ...options })).answers;
    const answer = typeof found.answer === "number" ? { score: found.answer } : found.answer;
    return group(labelled(answer), explained(found, texts));
  },
};

/** A class with probabilities, labels with theirs, or a score. */
function labelled(answer) {
  if (answer.score !== undefined) {
    const score = element("p", { class: "figure" }, signed(answer.score));
    return part("Score", score, note("A regression: the scale is that of its training data."));
  }
  const chosen = answer.labels ?? [answer.label];
  const rows = Object.entries(answer.probabilities).map(([label, probability]) =>
    chance(label, probability, chosen.includes(label)),
  );
  rows.sort((one, other) => other.share - one.share);
  const title = answer.labels ? "Labels" : "Class";
  const told = chosen.length ? chosen.join(", ") : "none";
  const more = answer.labels && note("Each label has a probability of its own.");
  return part(title, element("p", { class: "figure", dir: "auto" }, told), bars(rows), more);
}

/** Words in the colour of their score, and the scores that are furthest from nought. */
function explained({ words, label, measures, method }, texts) {
  const most = Math.max(...words.map(({ score }) => Math.abs(score))) || 1;
  const texted = Object.entries(texts).map(([segment, text]) => {
    const own = words.filter((word) => word.segment === segment);
    return marked(text, own, ({ score }, said) =>
      element(
        "mark",
        {
          class: score < 0 ? "word against" : "word for",
          style: { "--share": Math.abs(score) / most },
          title: signed(score),
        },
        said,
      ),
    );
  });
  const sorted = [...words].sort((one, other) => Math.abs(other.score) - Math.abs(one.score));
  const rows = sorted.slice(0, WORDS_SHOWN).map(({ text, score }) => ({
    name: text,
    share: score / most,
    text: signed(score),
  }));
  const isSigned = method !== "rollout";
  const what = label === null ? "a high score" : "it";
  const title = label === null ? "Which words mattered" : `Which words mattered for “${label}”`;
  return part(
    title,
    texted,
    isSigned && legend([["for", `speaks for ${what}`], ["against", `speaks against ${what}`]]),
    bars(rows, { isSigned }),
    words.length > WORDS_SHOWN && note(`The ${WORDS_SHOWN} furthest from 0 of ${words.length}.`),
    note(`${capitalized(measures)}.`),
  );
}

function legend(entries) {
  const items = entries.map(([kind, title, hue]) =>
    element(
      "li",
      {},
      element("span", { class: `swatch ${kind}`, style: { "--hue": hue ?? 0 } }),
      title,
    ),
  );
  return element("ul", { class: "legend" }, items);
}

export const answer = {
  id: "answer",
  title: "Answer",
  about: "A question, and the words of the context that answer it.",
  needs: ["answer"],
  fields: () => [
    { name: "question", label: "Question", kind: "line" },
    { name: "context", label: "Context", kind: "area", rows: 8 },
  ],
  examples: () => [
    {
      question: "Who wrote the first program?",
      context:
        "Ada Lovelace published the first program in 1843, for an engine that Charles Babbage" +
        " had designed and never finished.",
    },
    { question: "When did Ann leave?", context: "Ann left Rome on Monday. Bob stayed in Paris." },
  ],
  async answer({ ask, values }) {
    const { question, context } = values;
    const [found] = (await ask("v1/answer", { question, context })).answers;
    const hasAnswer = found.text !== "";
    const nullScore = found.null_odds; // null of a model that always answers
    const spans = hasAnswer ? [found] : [];
    const rows = [
      chance(hasAnswer ? found.text : "no answer", found.confidence, true),
      chance(hasAnswer ? "everything else" : "all spans of the context", 1 - found.confidence),
    ];
    return group(
      part(
        hasAnswer ? "Answer" : "No answer in this context",
        hasAnswer && element("p", { class: "figure", dir: "auto" }, found.text),
        bars(rows),
        nullScore !== null &&
          note(
            `“No answer” scores ${signed(nullScore)} beside the best span: above the model's` +
              " threshold there is no answer.",
          ),
      ),
      part("Context", marked(context, spans, (_, said) => element("mark", {}, said))),
    );
  },
};

export const tag = {
  id: "tag",
  title: "Entities",
  about: "Names in a text, coloured by their type.",
  needs: ["tag"],
  fields: () => [{ name: "text", label: "Text", kind: "area", rows: 6 }],
  examples: () => [
    { text: "Ann Smith left Rome on Monday to work for Siemens in Berlin." },
    { text: "The United Nations met in Geneva, said Kofi Annan." },
  ],
  async answer({ ask, values, model }) {
    const [found] = (await ask("v1/tag", { text: values.text })).answers;
    const tags = model.labels.filter((label) => label !== "O");
    const types = [...new Set(tags.map((label) => label.replace(/^[BI]-/, "")))];
    const hueOf = (type) => Math.round((types.indexOf(type) * 360) / types.length + 210) % 360;
    const text = marked(values.text, found.entities, ({ type, confidence }, said) =>
      element(
        "mark",
        { class: "entity", style: { "--hue": hueOf(type) }, title: percent(confidence) },
        said,
        element("span", { class: "type" }, type),
      ),
    );
    const seen = [...new Set(found.entities.map(({ type }) => type))];
    const told = seen.map((type) => {
      const count = found.entities.filter((entity) => entity.type === type).length;
      return ["entity", `${type} ${count}`, hueOf(type)];
    });
    const words = found.tokens.map((word, number) =>
      element(
        "tr",
        {},
        element("td", { dir: "auto" }, word),
        element("td", {}, found.tags[number]),
        element("td", { class: "value" }, percent(found.confidences[number])),
      ),
    );
    return group(
      part(found.entities.length ? "Entities" : "No entity in this text", text, legend(told)),
      element(
        "details",
        {},
        element("summary", {}, `All ${words.length} words with their tags`),
        element("table", { class: "plain" }, element("tbody", {}, words)),
      ),
    );
  },
};

export const choose = {
  id: "choose",
  title: "Choose",
  about: "A beginning, and which of several ways to go on fits it best.",
  needs: ["choose"],
  fields: () => [
    { name: "prompt", label: "Beginning", kind: "area", rows: 3 },
    { name: "options", label: "Options, one a line", kind: "area", rows: 5 },
  ],
  examples: () => [
    {
      prompt: "He opens the door",
      options: "and enters the room.\nof milk and honey.\nbecause the sea is salt.",
    },
    { prompt: "It began to rain, so she", options: "opened her umbrella.\nate the piano." },
  ],
  async answer({ ask, values }) {
    const options = lines(values.options);
    if (options.length < 2) throw new Error("Write two options or more, one a line.");
    const [found] = (await ask("v1/choose", { prompt: values.prompt, options })).answers;
    const rows = options.map((option, number) =>
      chance(option, found.probabilities[number], number === found.index),
    );
    const best = element("mark", {}, found.option);
    const text = element("p", { class: "text large", dir: "auto" }, `${values.prompt} `, best);
    return group(text, part("Options", bars(rows)));
  },
};
