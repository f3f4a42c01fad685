// The page: tabs, the form of the chosen one, its answer, and the link that holds them.

import { answer, choose, classify, fill, tag } from "./answers.js";
import { copy, element, field, labelledSelect } from "./elements.js";
import { attention, search, similarity, tokens } from "./inside.js";
import { api, forgetAnswers, get, key, models, post, setKey } from "./server.js";

const VIEWS = [
  classify, fill, answer, tag, choose, tokens, attention, similarity, search, models, api,
];
const WRITTEN_AFTER = 300; // milliseconds until an edit is in the link
const at = (id) => document.getElementById(id);

let served = []; // of /v1/models
let state = { tab: "", model: "", versus: "", values: {} };
let hasAsked = false; // the answer on the page belongs to the link
let waiting = new AbortController(); // of the request under way
let writing = 0; // timer of an edit
const drafts = new Map(); // states of the tabs that were left

// --- which views, models and fields there are

const modelsOf = (view) =>
  served.filter((model) => view.needs.some((method) => model.methods.includes(method)));
const usable = () => VIEWS.filter((view) => !view.needs.length || modelsOf(view).length);
const current = () => usable().find((view) => view.id === state.tab) ?? usable()[0];
const chosen = (view) =>
  modelsOf(view).find((model) => model.id === state.model) ?? modelsOf(view)[0];

/** Models that a view can show beside another: those that are asked by the same fields. */
function comparable(view, model) {
  const fieldsOf = (own) => view.fields(own).map(({ name }) => name).join();
  const isAlike = (other) => other !== model && fieldsOf(other) === fieldsOf(model);
  return modelsOf(view).filter(isAlike);
}

/** The values of a view's fields; what the state does not have is as it is at the beginning. */
function valuesOf(view, model) {
  const values = {};
  for (const spec of view.fields(model)) values[spec.name] = spec.initial ?? "";
  for (const spec of view.fields(model)) {
    const given = state.values[spec.name];
    const isKnown = !spec.options || spec.options.some(([own]) => own === given);
    if (given !== undefined && isKnown) values[spec.name] = given;
  }
  for (const name of view.hidden ?? []) {
    if (state.values[name]) values[name] = state.values[name];
  }
  return values;
}

/** True where something has been written. */
const isFilled = (view, model) =>
  view.fields(model).some((spec) => !spec.options && state.values[spec.name]?.trim());

// --- the link

function link() {
  const view = current();
  const words = new URLSearchParams();
  if (state.model) words.set("model", state.model);
  if (state.versus) words.set("versus", state.versus);
  for (const [name, value] of Object.entries(state.values)) {
    if (value) words.set(name, value);
  }
  return `#${view.id}${words.size ? `?${words}` : ""}`;
}

function readLink() {
  const [tab, words = ""] = location.hash.slice(1).split(/\?(.*)/s);
  const { model = "", versus = "", ...values } = Object.fromEntries(new URLSearchParams(words));
  state = { tab, model, versus, values };
}

/** Write the state in the address: as a page to go back from, or in place of the last. */
function writeLink(isNew) {
  clearTimeout(writing);
  if (link() === location.hash) return;
  history[isNew ? "pushState" : "replaceState"](null, "", link());
}

// --- drawing

function drawTabs() {
  const view = current();
  const tabs = usable().map((own) =>
    element(
      "button",
      {
        type: "button",
        role: "tab",
        id: `tab-${own.id}`,
        "aria-controls": "panel",
        "aria-selected": String(own === view),
        tabindex: own === view ? "0" : "-1",
        onclick: () => openTab(own),
      },
      own.title,
    ),
  );
  keepFocus(() => at("tabs").replaceChildren(...tabs));
  at("panel").setAttribute("aria-labelledby", `tab-${view.id}`);
  document.title = `${view.title} · bertsmith`;
}

/** Arrow keys, Home and End go from tab to tab. */
function moveInTabs(event) {
  const views = usable();
  const place = views.indexOf(current());
  const steps = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: views.length - 1 };
  if (!(event.key in steps)) return;
  event.preventDefault();
  const view = views[(steps[event.key] + views.length) % views.length];
  openTab(view);
  at(`tab-${view.id}`).focus();
}

function openTab(view) {
  drafts.set(current().id, state);
  const left = hasAsked;
  state = drafts.get(view.id) ?? { tab: view.id, model: "", versus: "", values: {} };
  writeLink(left);
  draw();
}

/** Draw what the state says, and ask where it has a text. */
function draw() {
  waiting.abort();
  hasAsked = false;
  const view = current();
  drawTabs();
  at("about").textContent = view.about;
  at("work").classList.toggle("alone", !view.fields);
  at("form").hidden = !view.fields;
  tell("");
  at("result").replaceChildren();
  if (!view.fields) {
    run([() => view.show(served, waiting.signal)], view);
    return;
  }
  drawForm();
  if (isFilled(view, chosen(view))) ask();
  else drawExamples(view, chosen(view));
}

function drawForm() {
  const view = current();
  const model = chosen(view);
  const values = valuesOf(view, model);
  const fields = view.fields(model).map((spec) =>
    field(spec, values[spec.name], (value, isChosen) => edit(spec.name, value, isChosen)),
  );
  keepFocus(() => {
    at("fields").replaceChildren(...fields);
    at("models").replaceChildren(...modelControls(view, model));
  });
}

function modelControls(view, model) {
  const options = modelsOf(view).map(({ id }) => [id, id]);
  const others = comparable(view, model).map(({ id }) => [id, id]);
  const choose = (name) => (value) => {
    state[name] = value;
    if (name === "model") delete state.values.masked; // another model may have other tokens
    if (state.versus === chosen(view).id) state.versus = "";
    drawForm();
    if (hasAsked) ask();
    else writeLink(false);
  };
  const found = [];
  if (options.length > 1) {
    found.push(labelledSelect("model", "Model", options, model.id, choose("model")));
  }
  if (others.length) {
    const given = others.some(([id]) => id === state.versus) ? state.versus : "";
    const beside = [["", "none"], ...others];
    found.push(labelledSelect("versus", "Compare with", beside, given, choose("versus")));
  }
  return found;
}

function drawExamples(view, model) {
  const examples = view.examples(model).map((values) => {
    const told = view.fields(model).map(({ name, options }) => !options && values[name]);
    const take = () => {
      change(values);
      at("ask").focus();
    };
    const button = { type: "button", class: "example", onclick: take };
    return element("li", {}, element("button", button, told.filter(Boolean).join(" · ")));
  });
  const title = element("h3", {}, "Try one");
  at("result").replaceChildren(title, element("ul", { class: "examples" }, examples));
}

/** Draw anew, and give the focus back to the element of the same id. */
function keepFocus(redraw) {
  const focused = document.activeElement?.id;
  redraw();
  if (focused && document.activeElement?.id !== focused) at(focused)?.focus();
}

// --- asking

function edit(name, value, isChosen) {
  state.values[name] = value;
  if (!isChosen) delete state.values.masked; // its numbers were those of the text before
  if (isChosen && hasAsked) {
    ask();
    return;
  }
  clearTimeout(writing);
  writing = setTimeout(() => writeLink(false), WRITTEN_AFTER);
}

/** Set values and ask again. */
function change(values) {
  Object.assign(state.values, values);
  drawForm();
  ask();
}

function ask() {
  const view = current();
  const model = chosen(view);
  if (!isFilled(view, model)) {
    tell("Write a text first, or take an example.");
    return;
  }
  writeLink(true);
  const others = comparable(view, model).filter(({ id }) => id === state.versus);
  const asked = [model, ...others].map((own) => async () => {
    const answered = await view.answer({
      model: own,
      values: valuesOf(view, own),
      change,
      ask: (path, body) => post(path, { model: own.id, ...body }, waiting.signal),
    });
    if (!others.length) return answered;
    return element("section", { "aria-label": own.id }, element("h2", {}, own.id), answered);
  });
  hasAsked = true;
  run(asked, view);
}

/** Show what some functions make; what fails is told next to the form. */
async function run(asked, view) {
  waiting.abort();
  const own = (waiting = new AbortController());
  const started = performance.now();
  at("result").setAttribute("aria-busy", "true");
  const done = await Promise.allSettled(asked.map((make) => make()));
  if (own !== waiting) return; // somebody has asked for something else
  at("result").removeAttribute("aria-busy");
  const failed = done.flatMap(({ reason }) => (reason ? [reason] : []));
  const made = done.flatMap(({ value }) => (value ? [value] : []));
  tell([...new Set(failed.map((error) => error.message))].join(" · "), failed[0]?.field);
  if (failed.some((error) => error.status === 401)) askForKey();
  // where nothing was made the answer before goes, too: it was to another text
  keepFocus(() => at("result").replaceChildren(...made));
  at("result").classList.toggle("beside", made.length > 1);
  const took = Math.max(1, Math.round(performance.now() - started));
  at("status").textContent = made.length && view.fields ? `Answered in ${took} ms` : "";
}

/** Show a message next to the form, "" for none, and mark the field at fault. */
function tell(message, fault = null) {
  at("error").textContent = message;
  at("status").textContent = "";
  const name = fault?.split("[")[0];
  for (const control of at("form").elements) {
    if (name && control.id === `field-${name}`) control.setAttribute("aria-invalid", "true");
    else control.removeAttribute("aria-invalid");
  }
}

function askForKey() {
  at("key").hidden = false;
  at("key-field").value = "";
  at("key-field").focus();
}

// --- the beginning

async function start() {
  try {
    served = (await get("v1/models")).data;
  } catch (error) {
    tell(key() && error.status === 401 ? "This key is not valid here." : error.message);
    at("form").hidden = true;
    if (error.status === 401) askForKey();
    return;
  }
  at("key").hidden = true;
  readLink();
  draw();
}

function setTheme(scheme) {
  document.documentElement.style.colorScheme = scheme;
  at("theme").value = scheme;
}

at("tabs").addEventListener("keydown", moveInTabs);
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  forgetAnswers();
  ask();
});
at("form").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
});
at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key-field").value.trim());
  start();
});
at("copy").addEventListener("click", () => {
  writeLink(false);
  copy(at("copy"), location.href);
});
at("theme").addEventListener("change", () => {
  localStorage.setItem("bertsmith-theme", at("theme").value);
  setTheme(at("theme").value);
});
addEventListener("popstate", () => {
  readLink();
  draw();
});
addEventListener("error", (event) => tell(`A fault of this page: ${event.message}`));
addEventListener("unhandledrejection", (event) => tell(event.reason?.message ?? `${event.reason}`));

setTheme(localStorage.getItem("bertsmith-theme") ?? "light dark");
start();
