"""Trained translators: open one, translate with it, and measure several on the same sentences.

Systems with a network and the word-for-word baseline have one interface, texts for texts, and are
measured by the same code.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from bertsmith.base.settings import from_mapping, to_mapping
from bertsmith.checkpoints.run_folder import RunFolder, describe
from bertsmith.checkpoints.stored import WEIGHTS
from bertsmith.checkpoints.tensors import read_tensor_file
from bertsmith.experiments.lineage import bleu
from bertsmith.experiments.lineage.decode import Search, translate_ids
from bertsmith.experiments.lineage.pairs import (
    JOINER,
    Languages,
    PairRows,
    Pairs,
    read_splits,
)
from bertsmith.experiments.lineage.settings import (
    SYSTEMS,
    DecodingSettings,
    PairData,
    TranslationSettings,
    WordForWordSettings,
)
from bertsmith.experiments.lineage.translation import KIND, new_model
from bertsmith.experiments.lineage.word_for_word import WordForWord
from bertsmith.training.engine import Engine, choose_engine
from bertsmith.training.settings import Machine

TABLE = "table.npz"  # of the word-for-word baseline
KINDS = {KIND.format(system=name): name for name in (*SYSTEMS, WordForWordSettings.system)}
SENTENCES = (1, 2, 3, 4)  # in a row, read as one text
BEAM = DecodingSettings()
ANY_MACHINE = Machine()


class Alignment(NamedTuple):
    """Attention of a translation to its source."""

    source: list[str]  # S pieces
    target: list[str]  # T pieces
    weights: np.ndarray  # float32 [T, S], each row sums to 1


class Translator(Protocol):
    """A trained system."""

    @property
    def settings(self) -> PairData: ...

    def translate(self, texts: Sequence[str], decoding: DecodingSettings = BEAM) -> list[str]: ...

    # None: the system has no attention
    def alignment(self, source: str, target: str) -> Alignment | None: ...


@dataclass(frozen=True)
class WordTranslator:
    """The word-for-word baseline, which does not search."""

    model: WordForWord
    settings: WordForWordSettings

    def translate(self, texts: Sequence[str], decoding: DecodingSettings = BEAM) -> list[str]:
        return self.model.translate(texts)

    def alignment(self, source: str, target: str) -> Alignment | None:
        return None


@dataclass(frozen=True, eq=False)
class NetworkTranslator:
    """A trained network with its vocabularies."""

    model: Any
    languages: Languages
    settings: TranslationSettings
    engine: Engine

    def translate(self, texts: Sequence[str], decoding: DecodingSettings = BEAM) -> list[str]:
        """Translate each text, an empty one to an empty one.

        A text of more pieces than training read is cut, with a line on stderr.

        Errors: ValueError for a beam larger than the vocabulary.
        """
        source, target = self.languages.source, self.languages.target
        rows, cut = source.sources(texts, self.settings.max_length)
        if len(cut):
            lines = f"text{'s' * (len(cut) > 1)} {', '.join(str(k + 1) for k in cut[:5])}"
            print(
                f"{lines}: more than {self.settings.max_length} pieces: the end is not read "
                f"({len(cut):,} of {len(texts):,})",
                file=sys.stderr,
            )
        search = Search(self.model, target.bos, target.eos, decoding)
        ids = np.split(rows.ids, rows.boundaries[1:-1])
        full = [k for k, row in enumerate(ids) if len(row) > 1]  # more than its end
        found = translate_ids(search, [ids[k].tolist() for k in full], self.engine)
        translations = [""] * len(texts)
        for k, hypotheses in zip(full, found, strict=True):
            translations[k] = target.decode(hypotheses[0].ids)
        return translations

    def alignment(self, source: str, target: str) -> Alignment | None:
        """The attention of each piece of a translation, its end included, to the source as read."""
        read, _ = self.languages.source.sources([source], self.settings.max_length)
        rows = PairRows(read, self.languages.target.targets([target]))
        batch = {k: self.engine.tensor(x) for k, x in rows.batch(np.arange(1)).items()}
        with torch.inference_mode():
            memory = self.model.encode(batch["source"], batch["source_lengths"])
            weights_1TS = self.model.alignments(memory, batch["target_in"])
        if weights_1TS is None:
            return None
        source_pieces = self.languages.source.tokenizer.vocabulary.pieces
        target_pieces = self.languages.target.tokenizer.vocabulary.pieces
        return Alignment(
            [source_pieces[k].strip(JOINER) for k in batch["source"][0].tolist()],
            [target_pieces[k].strip(JOINER) for k in batch["target_out"][0].tolist()],
            weights_1TS[0].float().cpu().numpy(),
        )


def train_word_for_word(
    settings: WordForWordSettings, command: Sequence[str] = ()
) -> dict[str, Any]:
    """Train the word-for-word baseline: the content of result.json.

    Errors: ValueError for data that do not fit, or a folder in use.
    """
    bleu.check_language(settings.target)
    run, started = RunFolder(settings.out, writes=(TABLE,)), time.monotonic()
    kind = KIND.format(system=settings.system)
    run.check_free(kind)
    splits = read_splits(settings.data, settings.source, settings.target, ("train",))
    with run.locked():
        model = WordForWord.train(splits["train"], settings.iterations)
        run.write_settings(describe(kind, command, to_mapping(settings)))
        model.save(run.path / TABLE)
        seconds = round(time.monotonic() - started, 1)
        result = {"seconds": seconds, "word_pairs": len(model.probabilities)}
        run.write_result(result)
    return result


def open_translator(folder: Path, machine: Machine = ANY_MACHINE) -> Translator:
    """The translator that a run wrote; the word-for-word baseline needs nothing of the machine.

    Errors: ValueError for a folder of anything else, or a run that has not ended; as
    `choose_engine`.
    """
    run = RunFolder(folder)
    record = run.settings()
    if record["kind"] not in KINDS:
        known = ", ".join(KINDS.values())
        raise ValueError(f"{folder}: a run of {record['kind']}, which does not translate ({known})")
    run.result()  # refuses a run that has not ended
    system, origin = KINDS[record["kind"]], str(folder / "run.json")
    if system == WordForWordSettings.system:
        settings = from_mapping(WordForWordSettings, record["settings"], origin)
        return WordTranslator(WordForWord.open(folder / TABLE), settings)
    settings = from_mapping(SYSTEMS[system], record["settings"], origin)
    engine = choose_engine(machine.device, machine.precision, machine.threads)
    languages = Languages.open(folder)
    model = new_model(settings, languages)
    model.load_state_dict(read_tensor_file(folder / WEIGHTS))
    return NetworkTranslator(model.to(engine.device).eval(), languages, settings, engine)


def measure(
    translators: dict[str, Translator],
    pairs: Pairs,
    training: Sequence[str],
    decoding: DecodingSettings = BEAM,
) -> dict[str, Any]:
    """Scores of several systems on the same sentences, and how sure their differences are.

    `training`: source texts whose words are counted for BLEU by the rarest word, which is left
    empty without them. All but `bleu.scores` is of BLEU lower-cased.

    {"data", "sentences", "systems": {name: {"bleu", "bleu_lower", "chrf", "seconds", "by_length",
    "by_rarest_word", "joined", "translations"}}, "pairs": [{"systems": two names, ...}]}

    Errors: ValueError as `translate`.
    """
    code = next(iter(translators.values())).settings.target
    systems: dict[str, Any] = {}
    for name, translator in translators.items():
        started = time.monotonic()
        found = translator.translate(pairs.source, decoding)
        seconds = round(time.monotonic() - started, 2)
        counts = bleu.statistics(found, pairs.target, code, lowercase=True)
        systems[name] = {
            **bleu.scores(found, pairs.target, code),
            "seconds": seconds,
            "by_length": bleu.by_length(counts, pairs.source),
            "by_rarest_word": bleu.by_rarest_word(counts, pairs.source, training)
            if training
            else [],
            "joined": _joined(translator, pairs, counts, decoding),
            "translations": found,
        }
    compared = [
        {
            "systems": [one, other],
            **bleu.paired_bootstrap(
                systems[one]["translations"],
                systems[other]["translations"],
                pairs.target,
                code,
                lowercase=True,
            ),
        }
        for one, other in itertools.combinations(systems, 2)
    ]
    return {"data": pairs.name, "sentences": len(pairs), "systems": systems, "pairs": compared}


def _joined(
    translator: Translator, pairs: Pairs, alone: np.ndarray, decoding: DecodingSettings
) -> list[dict[str, Any]]:
    """BLEU of texts of so many sentences; `alone` are the statistics of those of one."""
    groups = []
    for number in [number for number in SENTENCES if number <= len(pairs)]:
        texts, counts = bleu.joined(pairs, number), alone
        if number > 1:
            found = translator.translate(texts.source, decoding)
            code = translator.settings.target
            counts = bleu.statistics(found, texts.target, code, lowercase=True)
        words = float(np.mean([len(text.split()) for text in texts.source]))
        groups.append({"sentences": number, "words": words, **bleu.with_interval(counts)})
    return groups
