"""BERT whole, in Python: from raw text to a fine-tuned model.

Use a model: a run, a Hugging Face folder, or a name on the hub.

    import bertsmith
    model = bertsmith.load("runs/reviews")
    model.classify("A fine film.").label    # one text, one answer: "good"
    model.classify(["Fine.", "Dull."])      # texts: a list of answers

A model can do what it was trained for; its other methods refuse, and
say what it can. help(bertsmith.Predictor) explains them, and text_pair,
the second text of a model of pairs. An answer has to_dict() for JSON.

    model.classify(text, text_pair)   Label: label, confidence, ...
                                      (of a multi-label model LabelSet)
    model.score(text, text_pair)      float, by a regression
    model.tag(text)                   TaggedText: tags, Entity by Entity
    model.answer(question, context)   AnswerSpan: text, start, end, ...
    model.choose(prompt, options)     Choice: option, index, ...
    model.fill("The [MASK] sat.")     a FillCandidate list each [MASK]
    model.explain(text, text_pair)    Explanation: a WordScore a word
    model.embed(text)                 a vector a text, float32 [N, H]
    model.features(text)              a vector a word, float32 [W, H]
    model.attention(text, text_pair)  Attention: what each token reads

Vectors of texts: bertsmith.search(vectors, queries) finds the nearest
by exact cosine, also in files that do not fit into memory; those of a
model that was only pre-trained tell more after Whitening.fit and apply;
bertsmith.quantize narrows them to int8 or bits.

bertsmith.export(model, out, to="onnx") writes files for ONNX Runtime
or OpenVINO, compares them with the model, and gives an ExportReport.
bertsmith.convert(source, destination) writes a clean folder for Hugging
Face or TensorFlow, proves it equal bit by bit, and gives a Converted.

Texts to numbers, as flat arrays:

    tokenizer = bertsmith.Tokenizer.from_pretrained("runs/books")
    encoded = tokenizer.encode_batch(["Many texts in,", "arrays out."])
    begin, end = encoded.boundaries[1:3]    # of the second text
    encoded.ids[begin:end], encoded.offsets[begin:end]

Train a model from text, step by step as the commands do:

    documents = bertsmith.read_documents("books.txt")    # or texts
    vocabulary = bertsmith.train_vocabulary(documents, 8000)
    tokenizer = bertsmith.Tokenizer(vocabulary)
    bertsmith.build_store("books.txt", tokenizer, "store")
    bertsmith.append_text("more-books.txt", "store")
    bertsmith.pretrain("store", "runs/books", size="mini", minutes=60)
    bertsmith.finetune("classify", data="reviews.csv", text="body",
                       label="stars", model="runs/books", out="runs/reviews")
    bertsmith.evaluate("runs/reviews", "test.csv").metrics["accuracy"]
    bertsmith.compare("runs/reviews", "runs/others")["metrics"]
    bertsmith.report("runs/reviews")
    bertsmith.predict("runs/reviews", "new.csv", out="labelled.csv")
    bertsmith.train_embeddings(data="faq.csv", text="query", text_pair="reply",
                               model="runs/books", out="runs/faq")

Their keywords are the flags of the commands; their results are a
PretrainResult, a FinetuneResult and an Evaluation, with to_dict(), else
a dict, and of predict and report the file.

What pre-training taught: bertsmith.evaluate_held_out(model, texts),
evaluate_blimp(model, pairs) and evaluate_probe(model, conll2003).

For your own PyTorch code: Encoder and ModelConfig are the model,
ScalarMix learned weights of layers, TokenStore the text of a store
(BuildSettings says how it is made), open_features the vectors that
`bertsmith features` wrote. VocabularySettings tell how to train a
Vocabulary; Normalization, PRESETS and Encoded are what a Tokenizer
takes and gives. PretrainSettings may be the recipe of pretrain.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bertsmith.base import VERSION

if TYPE_CHECKING:
    from bertsmith.checkpoints.convert import Converted as Converted
    from bertsmith.checkpoints.convert import convert as convert
    from bertsmith.corpus.build.build import append_text as append_text
    from bertsmith.corpus.build.build import build_store as build_store
    from bertsmith.corpus.build.settings import BuildSettings as BuildSettings
    from bertsmith.corpus.store.store import TokenStore as TokenStore
    from bertsmith.experiments.finetuning import FinetuneResult as FinetuneResult
    from bertsmith.experiments.finetuning import finetune as finetune
    from bertsmith.experiments.report import report as report
    from bertsmith.inference.answers import AnswerSpan as AnswerSpan
    from bertsmith.inference.answers import Attention as Attention
    from bertsmith.inference.answers import Choice as Choice
    from bertsmith.inference.answers import Entity as Entity
    from bertsmith.inference.answers import Explanation as Explanation
    from bertsmith.inference.answers import FillCandidate as FillCandidate
    from bertsmith.inference.answers import Label as Label
    from bertsmith.inference.answers import LabelSet as LabelSet
    from bertsmith.inference.answers import TaggedText as TaggedText
    from bertsmith.inference.answers import WordScore as WordScore
    from bertsmith.inference.embeddings.search import search as search
    from bertsmith.inference.embeddings.train import train_embeddings as train_embeddings
    from bertsmith.inference.embeddings.vectors import Whitening as Whitening
    from bertsmith.inference.embeddings.vectors import quantize as quantize
    from bertsmith.inference.evaluation.held_out import evaluate_held_out as evaluate_held_out
    from bertsmith.inference.evaluation.labelled import Evaluation as Evaluation
    from bertsmith.inference.evaluation.labelled import evaluate as evaluate
    from bertsmith.inference.evaluation.minimal_pairs import evaluate_blimp as evaluate_blimp
    from bertsmith.inference.evaluation.probe import evaluate_probe as evaluate_probe
    from bertsmith.inference.export.comparison import ExportReport as ExportReport
    from bertsmith.inference.export.export import export as export
    from bertsmith.inference.features import open_features as open_features
    from bertsmith.inference.predict import predict as predict
    from bertsmith.inference.predictor import Predictor as Predictor
    from bertsmith.inference.predictor import load as load
    from bertsmith.model.config import ModelConfig as ModelConfig
    from bertsmith.model.encoder import Encoder as Encoder
    from bertsmith.model.recurrent import ScalarMix as ScalarMix
    from bertsmith.reports.significance import compare as compare
    from bertsmith.text.readers.documents import read_documents as read_documents
    from bertsmith.text.tokenizer.normalize import PRESETS as PRESETS
    from bertsmith.text.tokenizer.normalize import Normalization as Normalization
    from bertsmith.text.tokenizer.rows import Encoded as Encoded
    from bertsmith.text.tokenizer.tokenizer import Tokenizer as Tokenizer
    from bertsmith.text.tokenizer.wordpiece import Vocabulary as Vocabulary
    from bertsmith.text.vocabulary.train import VocabularySettings as VocabularySettings
    from bertsmith.text.vocabulary.train import train_vocabulary as train_vocabulary
    from bertsmith.training.pretraining.run import PretrainResult as PretrainResult
    from bertsmith.training.pretraining.run import pretrain as pretrain
    from bertsmith.training.pretraining.settings import PretrainSettings as PretrainSettings

__version__ = VERSION

# What `help(bertsmith)` shows in full; the classes have methods by the hundred.
__all__ = ["evaluate", "finetune", "load", "pretrain"]

_EXPORTS = {  # module -> the names that are taken from it
    "checkpoints.convert": ("Converted", "convert"),
    "corpus.build.build": ("append_text", "build_store"),
    "corpus.build.settings": ("BuildSettings",),
    "corpus.store.store": ("TokenStore",),
    "experiments.finetuning": ("FinetuneResult", "finetune"),
    "experiments.report": ("report",),
    "inference.answers": (
        *("AnswerSpan", "Attention", "Choice", "Entity", "Explanation", "FillCandidate", "Label"),
        *("LabelSet", "TaggedText", "WordScore"),
    ),
    "inference.embeddings.search": ("search",),
    "inference.embeddings.train": ("train_embeddings",),
    "inference.embeddings.vectors": ("Whitening", "quantize"),
    "inference.evaluation.held_out": ("evaluate_held_out",),
    "inference.evaluation.labelled": ("Evaluation", "evaluate"),
    "inference.evaluation.minimal_pairs": ("evaluate_blimp",),
    "inference.evaluation.probe": ("evaluate_probe",),
    "inference.export.comparison": ("ExportReport",),
    "inference.export.export": ("export",),
    "inference.features": ("open_features",),
    "inference.predict": ("predict",),
    "inference.predictor": ("Predictor", "load"),
    "model.config": ("ModelConfig",),
    "model.encoder": ("Encoder",),
    "model.recurrent": ("ScalarMix",),
    "reports.significance": ("compare",),
    "text.readers.documents": ("read_documents",),
    "text.tokenizer.normalize": ("PRESETS", "Normalization"),
    "text.tokenizer.rows": ("Encoded",),
    "text.tokenizer.tokenizer": ("Tokenizer",),
    "text.tokenizer.wordpiece": ("Vocabulary",),
    "text.vocabulary.train": ("VocabularySettings", "train_vocabulary"),
    "training.pretraining.run": ("PretrainResult", "pretrain"),
    "training.pretraining.settings": ("PretrainSettings",),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from bertsmith.base.settings import nearest

        message = f"module 'bertsmith' has no attribute '{name}': {nearest(name, _HOME)}"
        raise AttributeError(message, name=name)  # without obj Python adds no hint of its own
    return getattr(importlib.import_module(f"bertsmith.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
