"""A model that answers: `load` a folder, give it texts. It knows the task it was fine-tuned for."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, overload

import numpy as np

from bertsmith.base.settings import checked
from bertsmith.base.terminal import OnBatch, ignore
from bertsmith.checkpoints.config_json import read_extra_config
from bertsmith.checkpoints.hub import open_model_folder
from bertsmith.inference import features
from bertsmith.inference.answers import (
    AnswerSpan,
    Attention,
    Choice,
    Entity,
    Explanation,
    FillCandidate,
    Label,
    LabelSet,
    TaggedText,
)
from bertsmith.inference.embeddings.pooling import (
    LongTexts,
    pooling_settings,
    pooling_warning,
)
from bertsmith.inference.embeddings.texts import cut_note, embed, resolve
from bertsmith.inference.engines.processor import choose_processor
from bertsmith.inference.engines.runner import LANGUAGE_MODEL, Runner
from bertsmith.inference.explanation import Method, Reading, attention, explain
from bertsmith.inference.fill import MaskFiller
from bertsmith.inference.model_task import read_run
from bertsmith.tasks.choice import ChoiceExamples
from bertsmith.tasks.examples import Examples, empty_note
from bertsmith.tasks.labels import listed
from bertsmith.tasks.squad.questions import Question, Questions
from bertsmith.tasks.tagging.running_text import given_sentences
from bertsmith.tasks.tagging.schemes import classes_scheme
from bertsmith.tasks.tagging.sentences import tagged_rows
from bertsmith.tasks.task import OWN_KINDS
from bertsmith.tasks.vectors import Pool, text_features
from bertsmith.text.tokenizer.tokenizer import as_items, as_texts
from bertsmith.training.finetuning.task_types.tagging import Tagged

Texts = Iterable[str]


@checked()
def load(
    model: str | Path, *, device: str = "auto", precision: str = "float32", engine: str = "auto"
) -> Predictor:
    """Open a run directory, a Hugging Face folder or a model of the Hugging Face hub.

    device     "auto": a GPU where there is one; or "cpu", "cuda", "cuda:1"
    precision  "int8" and, where the machine multiplies it, "bf16" are quicker and less exact;
               "auto": float32, unless the first texts are many and a sample shows another precision
               or engine faster and hardly off
    engine     "bertsmith" (ours, on a CPU), "pytorch", or "onnx" and "openvino", which run what
               `export` wrote into the folder; "auto": the first of these that can, or that is
               measured, see `precision`

    Errors: ValueError for a folder without a model, files that do not fit one another, a device or
    precision that this machine does not have, an engine that cannot read the model.
    """
    processor = choose_processor(device, precision, engine)
    return Predictor(open_model_folder(str(model)), processor)


def opened(model: str | Path | Predictor) -> Predictor:
    """The predictor that `load` gave or, of a name, gives. Errors: as `load`."""
    return model if isinstance(model, Predictor) else load(model)


class Predictor(Runner):
    """Answers of one model; its weights are read when the first answer is asked for.

    One string is one text and gets one answer. A list, tuple, NumPy array, pandas Series or
    generator of texts gets a list of answers, in its order. A method refuses what is neither, and a
    model that was not made for it, with a ValueError.
    """

    _has_embedded = False

    def __repr__(self) -> str:
        """Such as <Predictor of runs/sst: classify (bad, good), embed, features; 2 layers of 128;
        cpu, bertsmith in int8>."""
        try:
            can = ", ".join(self.methods)
            if self.methods[0] not in ("fill", "embed") and (names := self.model_task.label_names):
                can = can.replace(",", f" ({listed(names)}),", 1)
        except ValueError:  # nothing says what its head is for
            can = "embed, features"
        shape = f"{self.config.num_layers} layers of {self.config.hidden_size}"
        own = self.processor
        on = f"{own.device}, {own.engine} in {own.precision}"
        return f"<Predictor of {self.folder}: {can}; {shape}; {on}>"

    def _check_can(self, method: str) -> None:
        if method not in self.methods:
            raise ValueError(
                f"{self.folder}: this model cannot {method}, but {', '.join(self.methods)}"
            )

    @overload
    def classify(self, text: str, text_pair: str | None = None) -> Label | LabelSet: ...
    @overload
    def classify(self, text: Texts, text_pair: Texts | None = None) -> list[Label | LabelSet]: ...
    @checked()
    def classify(
        self, text: str | Texts, text_pair: str | Texts | None = None
    ) -> Label | LabelSet | list[Label | LabelSet]:
        """The class of a text, or of a pair; of a multi-label model its labels.

            bertsmith.load("runs/reviews").classify("A fine film.")
            Label(label='good', confidence=0.981)

        A text longer than in training is treated as it was there; an empty one is answered, and a
        line on stderr says so.

        Errors: ValueError for single texts where the model was trained on pairs, and the reverse.
        """
        self._check_can("classify")
        rows = self._label(text, text_pair)
        if self.task_type.name == "multilabel":
            return _as_given(text, [LabelSet(tuple(r["labels"]), r["probabilities"]) for r in rows])
        answers = [Label(r["label"], r["probability"], r["probabilities"]) for r in rows]
        return _as_given(text, answers)

    @overload
    def score(self, text: str, text_pair: str | None = None) -> float: ...
    @overload
    def score(self, text: Texts, text_pair: Texts | None = None) -> list[float]: ...
    @checked()
    def score(self, text: str | Texts, text_pair: str | Texts | None = None) -> float | list[float]:
        """The number that a regression gives a text, or a pair.

            bertsmith.load("runs/stsb").score("A man sings.", "Someone is singing.")
            4.31

        Errors: as `classify`.
        """
        self._check_can("score")
        return _as_given(text, [row["score"] for row in self._label(text, text_pair)])

    def _label(self, text: Any, text_pair: Any) -> list[dict[str, Any]]:
        if text_pair is None:
            first, second = as_texts(text, "text"), None
        else:
            first, second = _pairs(text, text_pair, ("text", "text_pair"))
        task = self.model_task.task
        if task.text_pair is not None and second is None:
            raise ValueError(f"{self.folder}: trained on pairs of texts: give `text_pair`, too")
        if task.text_pair is None and second is not None and self.says_columns:
            raise ValueError(f"{self.folder}: trained on single texts: leave `text_pair` out")
        if not first:
            return []
        lines, names = list(range(1, len(first) + 1)), self.model_task.label_names
        examples = Examples(first, second, None, names, "text", lines)
        if note := empty_note(**examples.counts()):
            self.note(note)
        return self.task_type.label_fields(self.predict(examples), self.model_task)  # type: ignore

    @functools.cached_property
    def says_columns(self) -> bool:
        """False of a model of own data by others, who do not say what columns it was trained on."""
        is_published = self.model_task.task.name not in OWN_KINDS
        return (
            is_published
            or "text_pair" in read_extra_config(self.folder)
            or bool(read_run(self.folder))
        )

    @overload
    def explain(
        self,
        text: str,
        text_pair: str | None = None,
        method: Method = "occlusion",
        label: str | None = None,
    ) -> Explanation: ...
    @overload
    def explain(
        self,
        text: Texts,
        text_pair: Texts | None = None,
        method: Method = "occlusion",
        label: str | None = None,
    ) -> list[Explanation]: ...
    @checked()
    def explain(
        self,
        text: str | Texts,
        text_pair: str | Texts | None = None,
        method: Method = "occlusion",
        label: str | None = None,
    ) -> Explanation | list[Explanation]:
        """The words of a text, or of a pair, that its class, label or score hangs on.

            bertsmith.load("runs/reviews").explain("A fine film.").words[1]
            WordScore(text='fine', start=2, end=6, segment='text', score=0.84)

        A score above 0 speaks for `label` (None: the predicted one, of several the most probable),
        one below 0 against it. "occlusion": a pass a word, with [MASK] in its place (without it, of
        a left-to-right model); "gradient": gradient x input, by PyTorch; "rollout": attention,
        which knows of no label, by PyTorch. `Explanation.measures` says what the scores mean. No
        method tells the model's reason.

        Words are those of the tokenizer, each the sum of its pieces. What does not fit into a row
        is not read and has no score, and a line on stderr says so.

        Errors: ValueError for a text without a word, a label that the model does not have, and one
        of rollout or a score; of "gradient" and "rollout" for a text of several windows.
        """
        self._check_can("explain")
        names = "text", "text_pair"
        columns = [as_texts(text, "text")] if text_pair is None else _pairs(text, text_pair, names)
        ask, found = getattr(self, self.methods[0]), []
        for texts in zip(*columns, strict=True):
            reading = Reading.of(self, *texts)
            found.append(explain(self, reading, ask(*texts), method, label))
        return _as_given(text, found)

    @overload
    def tag(self, text: str) -> TaggedText: ...
    @overload
    def tag(self, text: Texts | Iterable[Texts]) -> list[TaggedText]: ...
    @checked()
    def tag(self, text: str | Texts | Iterable[Texts]) -> TaggedText | list[TaggedText]:
        """The words of a text with their tags, and its entities.

            bertsmith.load("runs/ner").tag("Ann sees Rome.").entities[0]
            Entity(text='Ann', start=0, end=3, type='PER', confidence=0.99)

        The rules that part words are in tasks/tagging/running_text.py. In place of a text may stand
        a list of its words, as an item of a list; places are then those of the words joined by
        blanks.
        """
        self._check_can("tag")
        sentences = given_sentences(text, classes_scheme(self.model_task.label_names))
        tagged = self.predict(sentences) if sentences.words else Tagged([], np.empty(0))
        answers = []
        for row in tagged_rows(sentences, tagged.tags, tagged.probabilities):
            entities = tuple(Entity(*entity.values()) for entity in row["entities"])
            words = (tuple(row[name]) for name in ("tokens", "tags", "probabilities"))
            answers.append(TaggedText(*words, entities=entities))
        return _as_given(text, answers)

    @overload
    def answer(self, question: str, context: str) -> AnswerSpan: ...
    @overload
    def answer(self, question: Texts, context: Texts) -> list[AnswerSpan]: ...
    @checked()
    def answer(self, question: str | Texts, context: str | Texts) -> AnswerSpan | list[AnswerSpan]:
        """The span of a context that answers a question.

            bertsmith.load("runs/squad").answer("Who left?", "Ann left Rome.")
            AnswerSpan(text='Ann', start=0, end=3, confidence=0.912)

        "There is no answer" is a span that is empty: `AnswerSpan.has_answer`.
        """
        self._check_can("answer")
        questions, contexts = _pairs(question, context, ("question", "context"))
        if not questions:
            return []
        found = [Question(str(k), words, k, None, None) for k, words in enumerate(questions)]
        data = Questions.of(found, contexts, "question")
        made = self.predict(data)
        answers = [
            AnswerSpan(c.text, c.begin, c.end, c.probability, answer.null_odds)
            for c, answer in zip(made.chosen, made.found, strict=True)
        ]
        return _as_given(question, answers)

    @overload
    def choose(self, prompt: str, options: Texts) -> Choice: ...
    @overload
    def choose(self, prompt: Texts, options: Iterable[Texts]) -> list[Choice]: ...
    @checked()
    def choose(
        self, prompt: str | Texts, options: Texts | Iterable[Texts]
    ) -> Choice | list[Choice]:
        """The option that goes on best from a prompt.

            bertsmith.load("runs/swag").choose("He opens the door", ["and enters.", "of milk."])
            Choice(option='and enters.', index=0, confidence=0.97)

        Several prompts have a list of options each, all of the same number.
        """
        self._check_can("choose")
        prompts = as_texts(prompt, "prompt")
        given = [options] if isinstance(prompt, str) else as_items(options, "options")
        rows = [as_texts(row, "options") for row in given]
        sizes = set(map(len, rows))
        if len(rows) != len(prompts) or len(sizes) > 1 or min(sizes, default=2) < 2:
            raise ValueError(
                f"options: expected two texts or more for each prompt, as many for all "
                f"{len(prompts)}, not {[len(row) for row in rows]}"
            )
        if not prompts:
            return []
        data = ChoiceExamples(prompts, rows, None, "prompt", list(range(1, len(prompts) + 1)))
        found = self.predict(data)
        answers = [
            Choice(row[k], k, probabilities[k], tuple(probabilities))
            for row, k, probabilities in zip(
                rows, found.predicted.tolist(), found.probabilities.tolist(), strict=True
            )
        ]
        return _as_given(prompt, answers)

    @overload
    def fill(self, text: str, top: int = 5) -> list[list[FillCandidate]]: ...
    @overload
    def fill(self, text: Texts, top: int = 5) -> list[list[list[FillCandidate]]]: ...
    @checked()
    def fill(self, text: str | Texts, top: int = 5) -> list[Any]:
        """The `top` likeliest pieces at each [MASK] of a text, a list a mask, best first.

            bertsmith.load("runs/books").fill("The [MASK] sat on the mat.")[0][0]
            FillCandidate(token='cat', id=4937, probability=0.31)

        The probability is of the softmax over the whole vocabulary, each mask by itself; [PAD],
        [CLS], [SEP], [MASK] and [unused] pieces are left out. `filler.joint` fills several masks
        together; `fill_words` and `fill_candidates` of inference/fill.py put whole words there.

        Errors: ValueError for a text without [MASK], or longer than the model's positions.
        """
        return _as_given(text, self.filler.pieces(as_texts(text, "text"), top))

    @checked()
    def embed(
        self,
        text: str | Texts,
        *,
        pool: Pool | None = None,
        max_length: int | None = None,
        prompt: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        long_texts: LongTexts = "cut",
    ) -> np.ndarray:
        """The vector of a text, float32 [D], or of N texts, [N, D].

            vectors = bertsmith.load("runs/pairs").embed(["A man sings.", "Rain."])

        `pool`: the "mean" of the tokens, their "max", "cls" or "mean_sqrt_len". `prompt`: a name
        that the folder has for one, or the text itself. Settings that are None are those of the
        folder (sentence-transformers, `bertsmith embed train`), else the mean of all tokens, as
        many as the model reads, without prompt or normalization. `dimensions`: the first numbers
        of a vector alone. Long texts are cut, which a line on stderr counts, or read in "windows"
        whose vectors become one.

        Cosines of a model that was only pre-trained tell little, those of unrelated texts are high:
        a line on stderr says so once. `bertsmith.Whitening` helps, and so does training, `bertsmith
        embed train`.

        Errors: ValueError for settings that the model cannot follow.
        """
        pooling = pooling_settings(
            self.folder, pool, max_length, prompt, normalize, dimensions, long_texts
        )
        texts = as_texts(text, "text")
        if not self._has_embedded and (warning := pooling_warning(self.folder, pooling)):
            self.note(f"warning: {warning}")
        self._has_embedded = True
        resolve(self, texts, pooling)
        vectors, cut, _ = embed(self, texts, pooling)
        if cut:
            self.note(cut_note(cut, len(texts)))
        return vectors[0] if isinstance(text, str) else vectors

    @checked()
    def features(
        self,
        text: str | Texts | Iterable[Texts],
        *,
        layers: str = "last",
        pool: features.Pool = "concatenate",
        align: features.Align = "first",
        max_length: int | None = None,
    ) -> np.ndarray | list[np.ndarray]:
        """The vectors of the W words of a text, float32 [W, D]; blanks part words.

            vectors = bertsmith.load("runs/books").features("Ann sees Rome.", layers="-2..-1")

        In place of a text may stand a list of its words, as an item of a list. `layers`: "last",
        "all", "-1", "0,6,12"; `pool`: how several become one, "concatenate", "sum" or "none"
        [W, layers, H]; `align`: of a word's "first" piece, their "mean", or a row for all "pieces".
        """
        items = [text] if isinstance(text, str) else as_items(text, "text")
        words = [item.split() if isinstance(item, str) else item for item in items]
        extraction = features.Extraction(self.config, layers, pool, align, max_length)
        return _as_given(text, features.text_vectors(self, words, extraction))

    @overload
    def attention(self, text: str, text_pair: str | None = None) -> Attention: ...
    @overload
    def attention(self, text: Texts, text_pair: Texts | None = None) -> list[Attention]: ...
    @checked()
    def attention(
        self, text: str | Texts, text_pair: str | Texts | None = None
    ) -> Attention | list[Attention]:
        """Attention of the tokens of a text, or of a pair, in each layer, by PyTorch in float32.

            bertsmith.load("runs/books").attention("Ann sees Rome.").weights[-1].mean(axis=0)

        `weights[l, a, i, j]` is how much of token j token i reads by head a of layer l; [CLS] and
        [SEP] are among the tokens. A text longer than the model's positions is refused.
        """
        names, positions = ("text", "text_pair"), self.config.max_positions
        columns = [as_texts(text, "text")] if text_pair is None else _pairs(text, text_pair, names)
        found = []
        for first, *second in zip(*columns, strict=True):
            row = text_features(self.tokenizer, [first], positions, second or None)
            if row.num_truncated:
                raise ValueError(f"text {first!r:.60}: the model reads {positions} tokens at most")
            found.append(attention(self, row))
        return _as_given(text, found)

    @functools.cached_property
    def filler(self) -> MaskFiller:
        """Fills several masks together, and is what the functions for whole words of fill.py take.

        Errors: ValueError for a model that reads from left to right, or has no masked-LM head.
        """
        if self.config.causal:
            raise ValueError(
                f"{self.folder}: a left-to-right model, which sees nothing behind a [MASK]: use "
                "one pre-trained with the objective mlm"
            )
        self.model(LANGUAGE_MODEL)
        return MaskFiller(self)

    def predict(self, data: Any, on_batch: OnBatch = ignore) -> Any:
        """The answers to data as `read` or `read_input` of the model's task type gives it.

        A line on stderr counts the texts that are cut.
        """
        model_task, task_type = self.model_task, self.task_type
        rows = task_type.featurize(self.tokenizer, data, model_task)
        if rows.num_truncated:
            self.note(f"{rows.long_note(model_task.encoding)}, as in training")
        self.resolve_for(rows)
        return task_type.answers(self.outputs(rows, on_batch), rows, data, model_task)


def _as_given(given: Any, answers: list[Any]) -> Any:
    """One answer to one text, else all."""
    return answers[0] if isinstance(given, str) else answers


def _pairs(first: Any, second: Any, names: tuple[str, str]) -> tuple[list[str], list[str]]:
    """The texts of two arguments, item by item a pair.

    Errors: ValueError for one text beside a list, and lists of unequal length.
    """
    firsts, seconds = as_texts(first, names[0]), as_texts(second, names[1])
    if isinstance(first, str) != isinstance(second, str) or len(firsts) != len(seconds):
        one = "one text" if isinstance(first, str) else f"{len(firsts)} texts"
        other = "one text" if isinstance(second, str) else f"{len(seconds)} texts"
        raise ValueError(
            f"{names[0]} is {one}, but {names[1]} {other}: give one of both, or lists of the same"
            " length"
        )
    return firsts, seconds
