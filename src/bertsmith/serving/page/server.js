// The server: how it is asked, why it refuses, and the tabs that tell what it has.

import { copy, element, note, part } from "./elements.js";

const KEPT = 16; // answers that are shown again without asking

/** A request that was refused: `status` is 0 where nobody answered. */
export class Refusal extends Error {
  constructor(status, message, field = null) {
    super(message);
    this.status = status;
    this.field = field;
  }
}

export function key() {
  return sessionStorage.getItem("bertsmith-key") ?? "";
}

export function setKey(value) {
  sessionStorage.setItem("bertsmith-key", value);
}

/** The server's response to GET, or to POST with a body. Errors: `Refusal`. */
async function fetched(path, body, signal) {
  const headers = key() ? { Authorization: `Bearer ${key()}` } : {};
  const options = { headers, signal };
  if (body) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  throw refusal(response.status, await response.text());
}

/** What a refusal says: other servers between may answer without JSON. */
function refusal(status, text) {
  let told = {};
  try {
    told = JSON.parse(text).error ?? {};
  } catch {
    told = { message: text.slice(0, 300) };
  }
  const field = told.param ?? null;
  const message = told.message || `The server refused with status ${status}`;
  return new Refusal(status, field && field !== "model" ? `${field}: ${message}` : message, field);
}

export async function get(path, signal) {
  return (await fetched(path, null, signal)).json();
}

const answers = new Map();

/** The answer to a body; the last ones are kept, for a change of view asks for the same again. */
export async function post(path, body, signal) {
  const name = `${path} ${JSON.stringify(body)}`;
  if (!answers.has(name)) {
    const found = await (await fetched(path, body, signal)).json();
    answers.set(name, found);
    if (answers.size > KEPT) answers.delete(answers.keys().next().value);
  }
  return answers.get(name);
}

/** Ask anew for all: the models may have been exchanged. */
export function forgetAnswers() {
  answers.clear();
}

export const models = {
  id: "models",
  title: "Models",
  about: "What is served here.",
  needs: [],
  show: async (served) => element("div", { class: "cards" }, served.map(modelCard)),
};

function modelCard(model) {
  const facts = [
    ["Can", model.methods.join(", ")],
    ["Labels", model.labels.join(", ")],
    ["Reads", `${model.reads_pairs ? "pairs of texts, " : ""}up to ${model.max_tokens} tokens`],
    ["Vectors", `${model.dimensions} numbers`],
    ["Computed by", model.precision],
  ];
  const list = facts
    .filter(([, told]) => told)
    .flatMap(([name, told]) => [element("dt", {}, name), element("dd", {}, told)]);
  const reports = model.reports.map((name) => element("li", {}, reportLink(model.id, name)));
  return part(
    model.id,
    element("dl", {}, list),
    reports.length > 0 && element("h4", {}, "Reports"),
    reports.length > 0 && element("ul", { class: "reports" }, reports),
  );
}

/** A link to a report. Links carry no key: where one is needed the page fetches it, to be saved. */
function reportLink(model, name) {
  const path = `reports/${encodeURIComponent(model)}/${encodeURIComponent(name)}`;
  const link = element("a", { href: path, target: "_blank", rel: "noopener" }, name);
  if (!key()) return link;
  link.textContent = `${name} (save)`;
  link.addEventListener("click", async (event) => {
    event.preventDefault();
    const address = URL.createObjectURL(await (await fetched(path)).blob());
    element("a", { href: address, download: name }).click();
  });
  return link;
}

export const api = {
  id: "api",
  title: "API",
  about: "The routes of this server, each with a request to copy.",
  needs: [],
  async show(_, signal) {
    const description = await get("openapi.json", signal);
    const routes = Object.entries(description.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, told]) => route(path, method.toUpperCase(), told)),
    );
    const whole = element("a", { href: "openapi.json" }, "openapi.json");
    const told = element("p", { class: "hint" }, "All fields and answers are described in ", whole);
    return element("div", { class: "routes" }, told, routes);
  },
};

function route(path, method, told) {
  const example = told.requestBody?.content["application/json"]?.example;
  const command = curl(path, example);
  const shown = element("pre", { tabindex: "0" }, command);
  const copying = element("button", { type: "button", class: "quiet" }, "Copy curl");
  copying.addEventListener("click", () => copy(copying, command, shown));
  return element(
    "details",
    {},
    element(
      "summary",
      {},
      element("span", { class: "method" }, method),
      element("code", {}, path),
      element("span", { class: "hint" }, told.summary),
    ),
    example && part("Body", element("pre", { tabindex: "0" }, JSON.stringify(example, null, 2))),
    part("curl", shown, copying),
    key() && note("Set KEY in your shell: your key itself is not written here."),
  );
}

/** A command for a shell; a quote in single quotes is written '\''. */
function curl(path, example) {
  const words = [`curl ${new URL(path.slice(1), document.baseURI)}`];
  if (key()) words.push('-H "Authorization: Bearer $KEY"');
  if (example) {
    words.push("-H 'Content-Type: application/json'");
    words.push(`-d '${JSON.stringify(example).replaceAll("'", "'\\''")}'`);
  }
  return words.join(" \\\n  ");
}
