"""Python's documentation into a model of novels: pieces saved, nats per word, what training adds.

    apt-get download python3.11-doc && dpkg -x python3.11-doc_*.deb doc
    python benchmarks/vocab_extend.py --model RUN --docs doc/usr/share/doc/python3.11/html \
        --work WORK [--minutes 5] [--threads 1] [--out benchmarks/results]

Every tenth page, sorted by path, is held out of all that follows: `bertsmith vocab extend` with its
defaults; two token stores of the other pages, with the old and with the new vocabulary; `bertsmith
pretrain --model` from the extended model and, the control, from the model as it was.

Nats per word: the held-out pages are cut into stretches of words that give at most 126 old pieces;
in each stretch 15% of the words, drawn among those with a letter and no [UNK], have all their
pieces masked; a word costs the negative log-likelihoods of its pieces together. All models see the
same words masked in the same stretches. Standard errors are of paired differences, the stretches
being the units.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bertsmith.base.files import read_json, write_json, write_text
from bertsmith.checkpoints.model_folder import load_model
from bertsmith.model.heads import PreTrainingModel
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import Vocabulary

HELD_OUT = 10  # every tenth page
LENGTH, MASKED, BATCH = 128, 0.15, 32
NOT_PROSE = ("genindex", "search", "contents", "py-modindex", "index", "download")
BLOCKS = {"p", "dt", "h1", "h2", "h3", "h4", "h5", "h6"}


class Page(HTMLParser):
    """Paragraphs, signatures and headings of a page's body, a line each; no code examples."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._text: list[str] = []
        self._in_body = False
        self._open = self._hidden = 0  # blocks; examples and links to the place itself

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if attributes.get("role") == "main":
            self._in_body = True
        elif attributes.get("class") in ("sphinxsidebar", "clearer"):
            self._in_body = False
        if tag == "pre" or self._hidden or attributes.get("class") == "headerlink":
            self._hidden += tag in ("pre", "a")
        if self._in_body and tag in BLOCKS:
            self._end_line()
            self._open += 1

    def handle_endtag(self, tag: str) -> None:
        if self._hidden and tag in ("pre", "a"):
            self._hidden -= 1
        if self._open and tag in BLOCKS:
            self._open -= 1
            self._end_line()

    def handle_data(self, data: str) -> None:
        if self._in_body and self._open and not self._hidden:
            self._text.append(data)

    def _end_line(self) -> None:
        line = " ".join("".join(self._text).split())
        self._text = []
        if line:
            self.lines.append(line)


def read_pages(folder: Path) -> list[list[str]]:
    """The lines of each page of the documentation that has any, sorted by path."""
    files = sorted(file for file in folder.rglob("*.html") if not file.name.startswith(NOT_PROSE))
    pages = []
    for file in files:
        page = Page()
        page.feed(file.read_text(encoding="utf-8"))
        if page.lines:
            pages.append(page.lines)
    if not pages:
        raise SystemExit(f"{folder}: no pages of a Sphinx documentation in it")
    return pages


class Stretch(NamedTuple):
    """Words [first, stop) of a text, of which those in `masked` are hidden."""

    text: int
    first: int
    stop: int
    masked: np.ndarray


def draw_words(texts: list[str], tokenizer: Tokenizer, seed: int) -> list[Stretch]:
    """Stretches of at most `LENGTH` - 2 pieces of `tokenizer`, and the words masked in them."""
    random = np.random.default_rng(seed)
    stretches = []
    for number, text in enumerate(texts):
        encoded = tokenizer.encode_batch([text])
        bounds = word_bounds(encoded.word_ids)
        known = encoded.ids[bounds[:-1]] != tokenizer.vocabulary.unk_id
        places = encoded.offsets
        fits = [
            bool(known[word])
            and any(c.isalpha() for c in text[places[begin, 0] : places[end - 1, 1]])
            for word, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False))
        ]
        first, last = 0, len(bounds) - 1
        while first < last:
            stop = int(np.searchsorted(bounds, bounds[first] + LENGTH - 2, side="right")) - 1
            stop = min(max(stop, first + 1), last)
            candidates = first + np.flatnonzero(fits[first:stop])
            count = min(round(MASKED * (stop - first)), len(candidates))
            if count:
                masked = np.sort(random.choice(candidates, count, replace=False))
                stretches.append(Stretch(number, first, stop, masked))
            first = stop
    return stretches


def word_bounds(word_ids: np.ndarray) -> np.ndarray:
    """Where each word's pieces begin, and the end of the last: [words + 1]."""
    return np.append(np.flatnonzero(np.diff(word_ids, prepend=-1)), len(word_ids))


class Costs(NamedTuple):
    nats: np.ndarray  # [words]
    pieces: np.ndarray  # [words]
    stretch: np.ndarray  # [words], number of the word's stretch


@torch.inference_mode()
def word_costs(folder: Path, texts: list[str], stretches: list[Stretch]) -> Costs:
    """Nats of every masked word under the model of a folder, in float32."""
    tokenizer = Tokenizer.from_pretrained(folder)
    model = load_model(folder, PreTrainingModel, dropout=0.0).model.eval()
    encoded = [tokenizer.encode_batch([text]) for text in texts]
    bounds = [word_bounds(each.word_ids) for each in encoded]
    costs = []
    for start in range(0, len(stretches), BATCH):
        rows = [
            row_of(stretch, encoded[stretch.text].ids, bounds[stretch.text], tokenizer.vocabulary)
            for stretch in stretches[start : start + BATCH]
        ]
        nats = negative_log_likelihoods(model, rows, tokenizer.vocabulary)
        for number, (row, cost) in enumerate(zip(rows, nats, strict=True), start=start):
            pieces = np.bincount(row.word)
            costs.append(Costs(np.bincount(row.word, cost), pieces, np.full(len(pieces), number)))
    nats, pieces, numbers = (np.concatenate(parts) for parts in zip(*costs, strict=True))
    return Costs(nats, pieces, numbers)


class Row(NamedTuple):
    ids: np.ndarray  # with [CLS], [SEP] and [MASK]
    positions: np.ndarray  # of the masks
    labels: np.ndarray  # pieces behind them
    word: np.ndarray  # which of the stretch's masked words each belongs to


def row_of(stretch: Stretch, pieces: np.ndarray, bounds: np.ndarray, names: Vocabulary) -> Row:
    begin = bounds[stretch.first]
    ids = np.concatenate([[names.cls_id], pieces[begin : bounds[stretch.stop]], [names.sep_id]])
    spans = [np.arange(bounds[word], bounds[word + 1]) for word in stretch.masked]
    positions = np.concatenate(spans) - begin + 1
    word = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
    labels = ids[positions]
    ids[positions] = names.mask_id
    return Row(ids, positions, labels, word)


def negative_log_likelihoods(
    model: PreTrainingModel, rows: list[Row], names: Vocabulary
) -> list[np.ndarray]:
    """Of the label at every masked position, by row."""
    lengths = torch.tensor([len(row.ids) for row in rows])
    counts = [len(row.positions) for row in rows]
    ids = torch.full((len(rows), int(lengths.max())), names.pad_id)
    positions = torch.zeros((len(rows), max(counts)), dtype=torch.int64)
    real = torch.zeros(positions.shape, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.from_numpy(row.ids)
        positions[number, : counts[number]] = torch.from_numpy(row.positions)
        real[number, : counts[number]] = True
    output = model(ids, torch.zeros_like(ids), lengths, positions, real.flatten().nonzero()[:, 0])
    labels = torch.from_numpy(np.concatenate([row.labels for row in rows])).long()
    nats = torch.nn.functional.cross_entropy(output.mlm_logits, labels, reduction="none")
    return [part.numpy() for part in nats.split(counts)]


def difference(after: Costs, before: Costs, chosen: np.ndarray) -> dict[str, float]:
    """Mean change in nats per word of the chosen words, with its standard error."""
    change = (after.nats - before.nats)[chosen]
    mean = change.mean()
    by_stretch = np.bincount(before.stretch[chosen], change - mean)
    return {"mean": float(mean), "error": float(np.sqrt((by_stretch**2).sum()) / len(change))}


def bertsmith(*words: object) -> str:
    """Run a command; what it printed."""
    line = [sys.executable, "-m", "bertsmith", *map(str, words)]
    print("$ bertsmith", *words, flush=True)
    done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    return done.stdout


def prepare(arguments: argparse.Namespace) -> tuple[list[str], dict[str, Path], str]:
    """Held-out texts, the four models, and what vocab extend printed; what is there is kept."""
    work, model = arguments.work, arguments.model
    pages = read_pages(arguments.docs)
    kept = [page for number, page in enumerate(pages, 1) if number % HELD_OUT]
    held_out = ["\n".join(page) for page in pages[HELD_OUT - 1 :: HELD_OUT]]
    write_text(work / "docs.txt", "\n\n".join("\n".join(page) for page in kept) + "\n")
    extended, said = work / "extended", work / "vocab extend.txt"
    if not extended.exists():
        words = ("vocab", "extend", work / "docs.txt", "--model", model, "--out", extended)
        write_text(said, bertsmith(*words))
    models = {"before": model, "extended": extended}
    for name, start in (("extended, trained", extended), ("control, trained", model)):
        store, run = (work / f"{kind}-{name.split(',')[0]}" for kind in ("store", "run"))
        models[name] = run
        if (run / "result.json").exists():
            continue
        bertsmith("corpus", work / "docs.txt", "--vocab", start, "--out", store, "--held-out", 0.05)
        flags = ("--minutes", arguments.minutes, "--threads", arguments.threads)
        bertsmith("pretrain", "--corpus", store, "--model", start, "--out", run, *flags)
    return held_out, models, said.read_text(encoding="utf-8")


def measure(texts: list[str], models: dict[str, Path]) -> dict[str, object]:
    """All figures of the four models."""
    vocabularies = {
        name: Tokenizer.from_pretrained(models[name]) for name in ("before", "extended")
    }
    pieces = {name: len(each.encode_batch(texts).ids) for name, each in vocabularies.items()}
    stretches = draw_words(texts, vocabularies["before"], seed=1)
    costs = {name: word_costs(folder, texts, stretches) for name, folder in models.items()}
    before = costs["before"]
    fewer = costs["extended"].pieces < before.pieces
    groups = {"all": np.full(len(fewer), True), "fewer pieces": fewer, "as before": ~fewer}
    return {
        "held_out_pages": len(texts),
        "pieces": pieces,
        "fewer_pieces": 1 - pieces["extended"] / pieces["before"],
        "stretches": len(stretches),
        "words": {group: int(chosen.sum()) for group, chosen in groups.items()},
        "nats_per_word": {
            name: {group: float(each.nats[chosen].mean()) for group, chosen in groups.items()}
            for name, each in costs.items()
        },
        "difference": {
            name: {group: difference(each, before, chosen) for group, chosen in groups.items()}
            for name, each in costs.items()
            if name != "before"
        },
        "trained_over_extended": difference(
            costs["extended, trained"], costs["extended"], groups["all"]
        ),
        "trained_over_control": difference(
            costs["extended, trained"], costs["control, trained"], groups["all"]
        ),
        "training": {
            name: {key: read_json(folder / "result.json")[key] for key in ("steps", "tokens")}
            for name, folder in models.items()
            if name.endswith("trained")
        },
    }


def markdown(result: dict) -> str:
    groups = list(result["words"])
    lines = [
        "# Python's documentation into a model of novels",
        "",
        f"`{result['command']}`, {result['date']}. {result['words']['all']:,} words masked in "
        f"{result['stretches']:,} stretches of {result['held_out_pages']} held-out pages; "
        f"{result['minutes']:g} minutes of training with {result['threads']} thread(s); "
        "differences to the model before, with their standard errors.",
        "",
        f"Pieces of the held-out pages: {result['pieces']['before']:,} before, "
        f"{result['pieces']['extended']:,} after: **{result['fewer_pieces']:.1%} fewer**.",
        "",
        "| nats per word | " + " | ".join(f"{g} ({result['words'][g]:,} words)" for g in groups),
        "|---|" + "---|" * len(groups),
    ]
    lines[-2] += " |"
    for name, values in result["nats_per_word"].items():
        cells = []
        for group in groups:
            change = result["difference"].get(name, {}).get(group)
            shown = f" ({change['mean']:+.2f} ± {change['error']:.2f})" if change else ""
            cells.append(f"{values[group]:.2f}{shown}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    steps = "; ".join(
        f"{name}: {figures['steps']:,} steps, {figures['tokens']:,} tokens"
        for name, figures in result["training"].items()
    )
    over = {key: result[key] for key in ("trained_over_extended", "trained_over_control")}
    shown = [f"{change['mean']:+.2f} ± {change['error']:.2f}" for change in over.values()]
    lines += [
        "",
        f"The extended model, trained, against itself before training: {shown[0]}; against the "
        f"control: {shown[1]} nats a word. {steps}.",
        "",
        "```",
        result["vocab_extend"].rstrip(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    texts, models, said = prepare(arguments)
    result: dict = {
        "command": f"python benchmarks/vocab_extend.py --model {arguments.model.name} ...",
        "date": datetime.now(UTC).date().isoformat(),
        "minutes": arguments.minutes,
        "threads": arguments.threads,
        "vocab_extend": said.replace(f"{arguments.work}/", ""),
        **measure(texts, models),
    }
    write_json(arguments.out / "vocab_extend.json", result)
    write_text(arguments.out / "vocab_extend.md", markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
