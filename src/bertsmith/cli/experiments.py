"""Commands: quickstart, the paper's tables, and the systems before and beside BERT."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from bertsmith.base.settings import Metavar, Positional, group_values
from bertsmith.base.terminal import counted, duration
from bertsmith.cli.outputs import (
    TUNE,
    after_pretraining,
    check_folder,
    check_new_folder,
    check_outputs,
    try_next,
)
from bertsmith.experiments.lineage.settings import (
    AttentionSettings,
    DecodingSettings,
    ElmoSettings,
    RNNSettings,
    TransformerSettings,
    TranslationSettings,
    WordForWordSettings,
)
from bertsmith.experiments.settings import QuickstartSettings, ReproduceSettings
from bertsmith.training.settings import Machine

TRANSLATE = (
    "lineage translate RUN new.txt --out translated.txt",
    "lineage evaluate RUN --out measured",
)


@dataclass(frozen=True, kw_only=True)
class Quickstart(QuickstartSettings):
    """The whole way, from raw text to a classifier, on text that is already on this machine.

    Examples:
      bertsmith quickstart
      bertsmith quickstart --minutes 10 --size mini --out my-first-bert
      bertsmith quickstart --corpus book1.txt book2.txt --out books

    It trains a vocabulary, builds a token store, pre-trains a small BERT, fills masks, fine-tunes a
    classifier against the same network from scratch, and writes a report to open in a browser.
    """

    arguments = {"size": "vocab_size"}  # of the library's `train_vocabulary`

    out: Path = Path("quickstart")
    """Folder for everything; an earlier quickstart in it is replaced."""
    corpus: list[Path] = field(default_factory=list)
    """Your own text instead: files or folders."""


def run_quickstart(settings: Quickstart) -> int:
    from bertsmith.experiments.quickstart import quickstart
    from bertsmith.reports.pages import write_report

    started = time.monotonic()
    summary = quickstart(settings.out, group_values(settings, QuickstartSettings), settings.corpus)
    report = settings.out / "report.html"
    write_report([settings.out], report)
    if "classification" in summary:
        sides = summary["classification"]
        print(f"\n{len(sides['labels'])} classes, {sides['test_examples']} test texts, 3 seeds:")
        for side, name in (("pretrained", "pre-trained"), ("scratch", "from scratch")):
            figures = sides[side]
            each = ", ".join(f"{value:.1%}" for value in figures["accuracies"].values())
            print(f"  {name:<13}{figures['mean']:.1%} +- {figures['spread']:.1%}   ({each})")
        print(sides["verdict"])
    print(f"\nall done in {duration(time.monotonic() - started)}; open {report}")
    print(after_pretraining(settings.out / "pretrain"))
    return 0


@dataclass(frozen=True, kw_only=True)
class Reproduce(ReproduceSettings):
    """Print the paper's tables beside ours, with spreads, tests and a verdict on each claim.

    Examples:
      bertsmith reproduce table5 --text books --data glue --dry-run
      bertsmith reproduce table5 --text books --data glue
      bertsmith reproduce all --text books --data data --models bert-base-cased --out paper
      bertsmith reproduce lineage --text books --data data --out paper

    Text is pre-trained on and the tasks are fine-tuned as each table says. Finished pieces are kept
    and shared by all tables: the same command goes on where it was stopped, and the same command
    on more machines with one --out shares the work. `lineage` is no table of the paper: BERT beside
    GPT, ELMo and left-to-right models at equal text and equal predictions.
    """


def run_reproduce(settings: Reproduce) -> None:
    from bertsmith.experiments.paper.experiment import read_experiment

    for name in settings.experiments:
        if name != "all":
            read_experiment(name, settings.scale)  # tells its mistakes before PyTorch is loaded
    from bertsmith.experiments.paper.reproduce import reproduce

    for page in reproduce(settings):
        print(page.read_text(encoding="utf-8"))
        print(f"{page.with_suffix('.html')}: the same, to open in a browser\n")


@dataclass(frozen=True, kw_only=True)
class LineageWordForWord(WordForWordSettings):
    """Learn a dictionary from sentences and their translations, and translate word for word.

    Examples:
      bertsmith lineage word-for-word --data multi30k --source en --target de --out words

    IBM model 1 (Brown et al. 1993), the statistical end of the line.
    """


def run_lineage_word_for_word(settings: LineageWordForWord) -> None:
    from bertsmith.experiments.lineage.translator import train_word_for_word

    check_folder(settings.out)
    result = train_word_for_word(settings, ["bertsmith", *sys.argv[1:]])
    print(f"{settings.out}: {result['word_pairs']:,} pairs of words in {result['seconds']} s")
    print(try_next(settings.out, *TRANSLATE))


@dataclass(frozen=True, kw_only=True)
class LineageRnn(RNNSettings):
    """Train two recurrent networks to translate, by one vector for a whole sentence.

    Examples:
      bertsmith lineage rnn --data multi30k --source en --target de --minutes 30 --out rnn
      bertsmith lineage rnn --form lstm --reversed-source --hidden-size 256 \\
          --data multi30k --source en --target de --minutes 30 --out lstm

    Cho et al. 2014 (gru) and Sutskever et al. 2014 (lstm). What `lineage attention` has besides is
    what attention gives.
    """


@dataclass(frozen=True, kw_only=True)
class LineageAttention(AttentionSettings):
    """Train recurrent networks to translate, with attention to the source.

    Examples:
      bertsmith lineage attention --data multi30k --source en --target de --minutes 30 --out att

    Bahdanau et al. 2015: the first network that need not keep a sentence in one vector.
    """


@dataclass(frozen=True, kw_only=True)
class LineageTransformer(TransformerSettings):
    """Train a Transformer, encoder and decoder, to translate.

    Examples:
      bertsmith lineage transformer --data multi30k --source en --target de --minutes 30 --out tf
      bertsmith lineage transformer --data pairs.tsv --source en --target fr --steps 5000 --out fr

    Vaswani et al. 2017: attention alone. BERT is its encoder.
    """


def run_lineage_rnn(settings: TranslationSettings) -> None:
    from bertsmith.experiments.lineage.translation import train_translation

    check_folder(settings.out)
    result = train_translation(settings, ["bertsmith", *sys.argv[1:]])
    print(
        f"{settings.out}: {result['steps']:,} steps, {result['epochs']:.1f} epochs; dev perplexity "
        f"{result['dev']['perplexity']:.2f}"
    )
    print(try_next(settings.out, *TRANSLATE))


run_lineage_attention = run_lineage_transformer = run_lineage_rnn


@dataclass(frozen=True, kw_only=True)
class LineageElmo(ElmoSettings):
    """Pre-train an ELMo: a language model from the left, one from the right, words as characters.

    Examples:
      bertsmith lineage elmo --text books --minutes 60 --out elmo
      bertsmith lineage elmo --text books --size 128x512 --stateful --softmax sampled \\
          --steps 20000 --out elmo
      bertsmith finetune ner --model elmo --data conll2003 --out ner

    Peters et al. 2018. OUT is a model for finetune, whose layers stay as they are while a head over
    them learns, and so is a folder of released weights: options.json and weights.hdf5.
    """


def run_lineage_elmo(settings: LineageElmo) -> None:
    from bertsmith.experiments.lineage.elmo import pretrain_elmo

    check_folder(settings.out)
    result = pretrain_elmo(settings, ["bertsmith", *sys.argv[1:]])
    print(
        f"{settings.out}: {result['steps']:,} steps, {result['tokens']:,} words; held-out "
        f"perplexity {result['held_out']['perplexity']:.1f}"
    )
    print(try_next(settings.out, TUNE))


@dataclass(frozen=True, kw_only=True)
class LineageTranslate(DecodingSettings, Machine):
    """Translate a file with a system of the lineage.

    Examples:
      bertsmith lineage translate tf new.txt --out new.de
      bertsmith lineage translate words new.txt --out new.de
      bertsmith lineage translate tf new.txt --out new.de --beam 1
    """

    model: Annotated[Path, Positional, Metavar("RUN")]
    """Run directory of a translation system."""
    input: Annotated[Path, Positional, Metavar("FILE")]
    """Text file, a text a line."""
    out: Path
    """Text file to write, a translation a line."""


def run_lineage_translate(settings: LineageTranslate) -> None:
    from bertsmith.base.files import write_text
    from bertsmith.experiments.lineage.translator import open_translator
    from bertsmith.text.readers.files import read_lines

    check_outputs([settings.input], {"--out": settings.out})
    translator = open_translator(settings.model, group_values(settings, Machine))
    texts = [text for _, text in read_lines(settings.input)]
    found = translator.translate(texts, group_values(settings, DecodingSettings))
    write_text(settings.out, "".join(f"{text}\n" for text in found))
    print(f"{settings.out}: {counted(len(found), 'translation')}")


@dataclass(frozen=True, kw_only=True)
class LineageEvaluate(DecodingSettings, Machine):
    """Measure systems of the lineage on the same sentences, and compare them.

    Examples:
      bertsmith lineage evaluate words rnn att tf --out compared
      bertsmith lineage evaluate att tf --split dev --out compared

    BLEU as written and lower-cased, chrF, with intervals by bootstrap; BLEU by length, of sentences
    joined two to four, and by the rarest word; a paired test of every two systems. OUT gets the
    translations, result.json and report.html with attention as pictures.
    """

    models: Annotated[list[Path], Positional, Metavar("RUN...")]
    """Run directories of translation systems of the same two languages."""
    out: Path
    """Folder to write."""
    data: Path | None = None
    """Data in place of that which the first system was trained on: the split, and perhaps train,
    whose words are counted."""
    split: str = "test"
    """test, dev, or one of several tests by the name of its files."""


def run_lineage_evaluate(settings: LineageEvaluate) -> None:
    check_new_folder(settings.out)
    from bertsmith.base.files import write_json, write_text
    from bertsmith.experiments.lineage.pairs import read_splits, split_of
    from bertsmith.experiments.lineage.translator import measure, open_translator
    from bertsmith.reports.translation import MAX_EXAMPLES, translation_page

    names = distinct_names(settings.models)
    machine = group_values(settings, Machine)
    translators = {
        name: open_translator(folder, machine)
        for name, folder in zip(names, settings.models, strict=True)
    }
    sides = {(one.settings.source, one.settings.target) for one in translators.values()}
    if len(sides) > 1:
        told = ", ".join(f"{source} to {target}" for source, target in sorted(sides))
        raise ValueError(f"the systems translate {told}: compare those of one direction")
    (source, target), data = sides.pop(), settings.data
    data = data or next(iter(translators.values())).settings.data
    splits = read_splits(data, source, target, {"train", "dev"} & {settings.split})
    pairs = split_of(splits, settings.split, data)
    decoding = group_values(settings, DecodingSettings)
    training = splits["train"].source if "train" in splits else ()
    result = measure(translators, pairs, training, decoding)

    texts = list(zip(pairs.source, pairs.target, strict=True))[:MAX_EXAMPLES]
    attention = {}
    for name, translator in translators.items():
        translations = result["systems"][name]["translations"]
        found = [translator.alignment(s, translations[k]) for k, (s, _) in enumerate(texts)]
        if None not in found:
            attention[name] = found
    curves = {n: dev_curve(f) for n, f in zip(names, settings.models, strict=True)}
    page = translation_page(result, texts, attention, {n: c for n, c in curves.items() if c})
    for name, found in result["systems"].items():
        write_text(settings.out / f"{name}.txt", "".join(f"{x}\n" for x in found["translations"]))
    write_json(settings.out / "result.json", without_translations(result))
    write_text(settings.out / "report.html", page)
    print("\n".join(comparison_lines(result)))
    print(f"{settings.out / 'report.html'}: the whole comparison, to open in a browser")


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """
    >>> distinct_names([Path("runs/a"), Path("b")]), distinct_names([Path("x/a"), Path("y/a")])
    (['a', 'b'], ['x-a', 'y-a'])
    """
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = ["-".join(folder.resolve().parts[-2:]) for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(map(str, folders))}: name each system once")
    return names


def dev_curve(folder: Path) -> list[tuple[float, float]]:
    """(Minutes of training, nats a piece on dev) at each measurement; [] without a log."""
    from bertsmith.base.files import read_json_lines

    log = folder / "log.jsonl"
    events = read_json_lines(log) if log.exists() else []
    return [(e["minutes"], e["nll"]) for e in events if e["event"] == "evaluate"]


def without_translations(result: dict[str, Any]) -> dict[str, Any]:
    """The figures alone: the texts have files of their own."""
    systems = {
        name: {key: value for key, value in found.items() if key != "translations"}
        for name, found in result["systems"].items()
    }
    return result | {"systems": systems}


def comparison_lines(result: dict[str, Any]) -> Iterator[str]:
    """A line a system, then one for every two of them."""
    for name, found in result["systems"].items():
        low, high = found["bleu_lower"]["interval"]
        yield (
            f"{name:<16} BLEU {found['bleu']['score']:5.2f}, lower-cased "
            f"{found['bleu_lower']['score']:5.2f} ({low:.2f} to {high:.2f}), "
            f"chrF {found['chrf']['score']:5.2f}, {found['seconds']:.1f} s"
        )
    for pair in result["pairs"]:
        (one, other), (low, high) = pair["systems"], pair["interval"]
        yield (
            f"{other} against {one}: {pair['difference']:+.2f} BLEU lower-cased "
            f"({low:+.2f} to {high:+.2f}), p {pair['p']:.3f}"
        )
    first = next(iter(result["systems"].values()))
    yield f"{first['bleu']['signature']}; {first['bleu_lower']['signature']}"
