"""Commands: embed, embed train, search, features, features ner."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import bertsmith
from bertsmith.base.settings import Hidden, Metavar, Positional, group_values
from bertsmith.base.terminal import Progress, scaled
from bertsmith.cli.flags import Answering, BulkAnswering
from bertsmith.cli.outputs import (
    check_folder,
    check_new_folder,
    check_outputs,
    try_next,
)
from bertsmith.training.finetuning.request import check_tokens_per_window, parse_seeds
from bertsmith.training.finetuning.settings import ROWS, FrozenSettings, PairRequest

if TYPE_CHECKING:
    import numpy as np

    from bertsmith.inference.embeddings.files import Vectors
    from bertsmith.inference.embeddings.vectors import Whitening

OUTPUTS = (".npy", ".jsonl")


@dataclass(frozen=True, kw_only=True)
class Embed(BulkAnswering):
    """Write a vector for every text of a file.

    Examples:
      bertsmith embed titles.txt --model pairs --out titles.npy --normalize
      bertsmith embed new.csv --text body --model run --out new.jsonl --whiten input
      bertsmith embed faq.txt --model pairs --out faq.npy --prompt passage --quantize int8
      cat titles.txt | bertsmith embed - --model pairs --out titles.npy

    A .txt file is a text a line; a .csv, .tsv, .jsonl or .parquet has one in the column --text.
    Vectors of a model that was only pre-trained say little about similarity, and the command warns
    of it: --whiten helps, and so does training (`bertsmith embed train`). Files
    may be of any size; what is done is kept in OUT.partial: after Ctrl-C or a kill the same command
    goes on.
    """

    input: Annotated[str, Positional, Metavar("INPUT")]
    """File with the texts; - for standard input, a text a line."""
    model: str
    """Run directory, Hugging Face folder or hub name."""
    out: Path
    """.npy (float32, a row a text) or .jsonl ({"text", "vector"} a line). A file that is there is
    replaced, once the new one is whole."""
    pool: Literal["mean", "cls", "max", "mean_sqrt_len"] | None = None
    """Mean of the tokens, the vector at [CLS], the tokens' largest values, or their sum over the
    root of their number. Default: as trained, else mean."""
    prompt: str | None = None
    """Put this before every text: the name of a prompt that the model has, such as query, or the
    text itself, such as "query: ". Default: as trained, else nothing."""
    no_prompt: bool = False
    """Put nothing before a text, also where the model was trained otherwise."""
    normalize: bool = False
    """Make every vector of length 1, so that dot products are cosines. Default: as trained."""
    no_normalize: bool = False
    """Leave the vectors their lengths, also where the model was trained otherwise."""
    whiten: Annotated[str | None, Metavar("FILE")] = None
    """Give the vectors mean 0 and equal, uncorrelated directions: those of the texts of FILE, or of
    INPUT itself when FILE is "input"."""
    dimensions: int | None = None
    """Keep the first so many numbers of a vector, before it is made of length 1; with --whiten the
    directions of the largest variance. Default: as trained, else all."""
    quantize: Literal["int8", "binary"] | None = None
    """Write int8, 256 steps of each dimension's range, or a bit a number, eight in an int8."""
    ranges: Path | None = None
    """With --quantize int8: a .npy [2, D] of each dimension's least and largest value. Default:
    those of the vectors, which are written to OUT with the ending .ranges.npy."""
    text: str | None = None
    """Column with the text of a table, also of --whiten. Default: text."""
    max_length: int | None = None
    """Tokens of a row. Default: as trained, else all the model can read."""
    long_texts: Literal["cut", "windows"] = "cut"
    """Cut texts that are longer, or read them in windows of equal length, whose vectors are pooled
    as their tokens are; of [CLS] it is the mean."""


def run_embed(settings: Embed) -> None:
    import numpy as np

    from bertsmith.inference.embeddings import pooling, vectors
    from bertsmith.inference.embeddings.files import TextFile, vectors_of_files
    from bertsmith.tasks.answer_files import is_text

    source, out = settings.input, settings.out
    other = None if settings.whiten in (None, "input") else Path(settings.whiten)
    _check(settings, other)
    predictor = settings.load(settings.model)
    folder = predictor.folder
    way = pooling.pooling_settings(
        folder,
        settings.pool,
        settings.max_length,
        "" if settings.no_prompt else settings.prompt,
        settings.normalize or (False if settings.no_normalize else None),
        None if settings.whiten else settings.dimensions,
        settings.long_texts,
    )
    if pooling.similarity_training(folder):
        print(f"{folder}: {way}", file=sys.stderr)

    # what can be told of the first texts is refused before the first vector is computed
    size = way.size(predictor.config.hidden_size)
    ranges = None if settings.ranges is None else vectors.read_ranges(settings.ranges)
    has_table = not all(map(is_text, (source, other or source)))
    read, *others = (
        TextFile(str(file), None if has_table and is_text(file) else settings.text)
        for file in (source, *([other] if other else []))
    )
    few = (others or [read])[0].count
    if settings.whiten and few is not None:
        vectors.Whitening.check(few, size, settings.dimensions)
    if settings.whiten:
        size = settings.dimensions or size
    if settings.quantize == "int8":
        vectors.check_ranges(ranges, size, 2 if read.count is None else read.count)

    unscaled = replace(way, normalize=False) if settings.whiten else way  # whitening comes first
    files, machine = [read, *others], settings.machine
    vectors_kept = vectors_of_files(predictor, files, unscaled, out, machine, settings.backend)
    with vectors_kept as (found, *more):
        whitening = None
        if settings.whiten:
            whitening = vectors.Whitening.fit(more[0] if more else found, settings.dimensions)
        scaled = _Scaled(found, whitening, way.normalize)
        if settings.quantize == "int8" and ranges is None:
            least_and_largest = [vectors.value_ranges(part) for _, part in scaled]
            ranges = vectors.value_ranges(np.concatenate(least_and_largest))
            _write_vectors(_ranges_file(out), [([], ranges)], 2)
        finished = scaled
        if settings.quantize:
            narrow = settings.quantize
            finished = ((texts, vectors.quantize(part, narrow, ranges)) for texts, part in scaled)
        count, width = len(found), _write_vectors(out, finished, len(found))
    print(f"{out}: {count:,} vectors of {width} numbers")
    if warning := pooling.pooling_warning(folder, way):
        print(f"warning: {warning}", file=sys.stderr)


@dataclass(frozen=True)
class _Scaled:
    """(Texts, vectors) of each part of a file, the vectors whitened."""

    vectors: Vectors
    whitening: Whitening | None
    normalizes: bool

    def __iter__(self) -> Iterator[tuple[Sequence[str], np.ndarray]]:
        from bertsmith.tasks.vectors import unit_length

        for texts, part in self.vectors.with_texts():
            if self.whitening:
                part = self.whitening.apply(part)
                part = unit_length(part) if self.normalizes else part
            yield texts, part


def _ranges_file(out: Path) -> Path:
    from bertsmith.inference.embeddings.vector_files import RANGES

    return out.with_suffix(RANGES)


def _write_vectors(out: Path, parts: Iterable[tuple[Sequence[str], np.ndarray]], count: int) -> int:
    """Write `count` vectors in all, and return the numbers in each."""
    import numpy as np

    from bertsmith.base.files import atomic_file

    width = 0
    with atomic_file(out) as temporary, temporary.open("wb") as file:
        for texts, vectors in parts:
            if out.suffix != ".npy":
                for text, vector in zip(texts, vectors.tolist(), strict=True):
                    file.write(json.dumps({"text": text, "vector": vector}).encode() + b"\n")
            else:
                vectors = np.ascontiguousarray(vectors)
                if not width:
                    shape = count, vectors.shape[1]
                    header = np.lib.format.header_data_from_array_1_0(vectors) | {"shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                file.write(vectors.tobytes())
            width = vectors.shape[1]
    return width


def _check(settings: Embed, whitening_file: Path | None) -> None:
    out = settings.out
    if out.suffix not in OUTPUTS:
        raise ValueError(f"{out}: end --out in {' or '.join(OUTPUTS)}")
    if settings.normalize and settings.no_normalize:
        raise ValueError("--normalize, --no-normalize: give one of them")
    if settings.prompt is not None and settings.no_prompt:
        raise ValueError("--prompt, --no-prompt: give one of them")
    if settings.ranges is not None and settings.quantize != "int8":
        raise ValueError(f"--ranges {settings.ranges}: only with --quantize int8")
    is_calibrated = settings.quantize == "int8" and settings.ranges is None
    outputs = {"--out": out, "--quantize": _ranges_file(out) if is_calibrated else None}
    check_outputs([Path(settings.input), whitening_file, settings.ranges], outputs)


@dataclass(frozen=True, kw_only=True)
class EmbedTrain(PairRequest):
    """Train a model's vectors of texts on pairs that belong together.

    Examples:
      bertsmith embed train --model run --data pairs.csv --text query --text-pair reply --out pairs
      bertsmith embed train --model run --data duplicates.tsv --text sentence1 \\
          --text-pair sentence2 --dev STS-B/dev.tsv --score score --out pairs

    Each first text must find its own second text among those of its group (multiple negatives
    ranking loss); nothing but the pairs is labelled. --dev is a file of pairs with a similarity
    each (STS-B): the Spearman correlation of the cosines with it is printed, before and after. OUT
    is a model folder for `bertsmith embed`.
    """


def run_embed_train(settings: EmbedTrain) -> None:
    from bertsmith.inference.embeddings.train import run_pairs

    check_folder(settings.out)
    result = run_pairs(settings, ["bertsmith", *sys.argv[1:]])
    for name, after in result["metrics"].items():
        print(f"{name} on dev: {after:.4f} (before: {result['metrics_before'][name]:.4f})")
    print(f"{settings.out}: trained on {result['train_pairs']:,} pairs")
    print(try_next(settings.out, "embed new.txt --model RUN --out vectors.npy", "report RUN"))


@dataclass(frozen=True, kw_only=True)
class Search(Answering):
    """Find the texts nearest to a query among the vectors that `embed` wrote.

    Examples:
      bertsmith search "How do I send it back?" --model pairs --vectors faq.npy --texts faq.txt
      bertsmith search --queries questions.txt --model pairs --prompt query --vectors shards --json
      bertsmith search --queries questions.npy --vectors faq.npy --top 3

    Every vector is compared (exact cosine), a few MiB of them in memory at a time. The queries must
    be made as the vectors were: with other flags of `embed` than --prompt, embed them first and
    give the .npy.
    """

    query: Annotated[str | None, Positional, Metavar("QUERY")] = None
    """The text to search for; or give --queries."""
    vectors: Path
    """.npy (float32 or float16, a row a text), or a folder of them, in the order of their names."""
    queries: Path | None = None
    """File of many: texts, as of `embed`, or vectors (.npy), which need no --model."""
    model: str | None = None
    """Model that made the vectors: run directory, Hugging Face folder or hub name."""
    prompt: str | None = None
    """Put before every query: the name of a prompt that the model has, or a text. Default: as
    trained, else nothing."""
    texts: Path | None = None
    """File with the texts of the vectors, to be shown: .txt or a table."""
    text: str | None = None
    """Column with the text of a table, of --texts and --queries. Default: text."""
    top: int = 10
    """How many to find for a query."""
    json: bool = False
    """Print a JSON object a query: {"query", "found": [{"row", "score", "text"}]}; rows count from
    0, through all files of a folder."""


def run_search(settings: Search) -> None:
    from bertsmith.inference.embeddings.search import QUERIES, search
    from bertsmith.inference.embeddings.vector_files import StoredVectors
    from bertsmith.tasks.answer_files import is_text, read_texts

    if (settings.query is None) == (settings.queries is None):
        raise ValueError("QUERY, --queries: give one of them")
    _check_search(settings)
    stored, shown = StoredVectors(settings.vectors), None
    if settings.texts is not None:
        column = None if is_text(settings.texts) else settings.text
        shown = [text for _, text in read_texts(settings.texts, column)]
        if len(shown) != stored.shape[0]:
            raise ValueError(
                f"--texts {settings.texts}: {len(shown):,} texts, but {settings.vectors} has"
                f" {stored.shape[0]:,} vectors: give the file that they were made of"
            )
    names, queries = _queries(settings)
    with Progress("search", stored.shape[0] * -(-len(queries) // QUERIES), "vectors") as progress:
        found = search(settings.vectors, queries, settings.top, progress.update)
    for name, rows, scores in zip(names, found.rows.tolist(), found.scores.tolist(), strict=True):
        hits = [
            {"row": row, "score": round(score, 6)} | ({"text": shown[row]} if shown else {})
            for row, score in zip(rows, scores, strict=True)
        ]
        if settings.json:
            print(json.dumps({"query": name, "found": hits}, ensure_ascii=False))
            continue
        print(name)
        for hit in hits:
            print(f"  {hit['score']:.4f}  {hit.get('text', hit['row'])}")


def _check_search(settings: Search) -> None:
    """Refuse flags that nothing reads. Errors: ValueError."""
    from bertsmith.tasks.answer_files import is_text

    has_vectors = settings.queries is not None and settings.queries.suffix == ".npy"
    names = ("model", "prompt", "device", "precision", "engine")
    unread = ", ".join(f"--{n}" for n in names if getattr(settings, n) not in (None, "auto"))
    if has_vectors and unread:
        raise ValueError(f"{unread}: without effect: {settings.queries} has vectors: leave it out")
    files = [settings.texts, None if has_vectors else settings.queries]
    if settings.text is not None and all(file is None or is_text(file) for file in files):
        raise ValueError(f"--text {settings.text}: no table is read: leave it out")


def _queries(settings: Search) -> tuple[list[str], np.ndarray]:
    """The names and the vectors of the queries."""
    from bertsmith.inference.embeddings.vector_files import read_queries
    from bertsmith.tasks.answer_files import is_text, read_texts

    file = settings.queries
    if file is not None and file.suffix == ".npy":
        vectors = read_queries(file)
        return [f"query {number}" for number in range(len(vectors))], vectors
    if settings.model is None:
        raise ValueError("missing --model: it turns texts into vectors")
    if file is None:
        texts = [settings.query or ""]
    else:
        column = None if is_text(file) else settings.text
        texts = [text for _, text in read_texts(file, column)]
    model = settings.load(settings.model)
    return texts, model.embed(texts, prompt=settings.prompt)


@dataclass(frozen=True, kw_only=True)
class Features(Answering):
    """Write a vector for every word of a file, out of any layers of a model.

    Examples:
      bertsmith features news.txt --model run --out vectors
      bertsmith features ner/train.conll --model run --out vectors --layers -4 --document-context
      bertsmith features reviews.csv --text body --model run --out v --layers all --pool none

    INPUT is .txt (a text a line), a table with --text (.csv, .tsv, .jsonl, .parquet), .jsonl or
    .parquet with {"tokens": [...]} or, under any other suffix, CoNLL columns; text may be packed
    (.gz, .bz2, .xz, .zst). The folder OUT holds a memory-mapped float16 array and where each text
    lies in it; `bertsmith.open_features(OUT)[k]` are the vectors of text k.
    """

    input: Annotated[Path, Positional, Metavar("INPUT")]
    """File with the texts or words."""
    model: str
    """Run directory, Hugging Face folder or hub name."""
    out: Path
    """Folder to write; it must be new or empty."""
    layers: str = "last"
    """last, all, -1, 0,6,12 or a span, written --layers=-4..-1; 0 is the embeddings' output."""
    pool: Literal["none", "sum", "concatenate"] = "concatenate"
    """How several layers become one vector; none: each by itself, for learned weights."""
    align: Literal["first", "mean", "pieces"] = "first"
    """A word's vector: of its first piece (a GPT's last), or the mean of its pieces; pieces: one a
    piece."""
    text: str | None = None
    """Column with the text of a table. Default: text."""
    document_context: bool = False
    """CoNLL columns with -DOCSTART- lines: fill each row with what stands around its sentence in
    the document (slower)."""
    max_length: int | None = None
    """Tokens of a row; longer texts are read in overlapping windows. Default: at most 512."""


def run_features(settings: Features) -> None:
    from bertsmith.inference.features import Extraction, extract_features
    from bertsmith.tasks.tagging.sentences import read_words

    out = settings.out
    check_new_folder(out)
    predictor = settings.load(settings.model)
    extraction = Extraction(
        predictor.config,
        settings.layers,
        settings.pool,
        settings.align,
        settings.max_length,
        settings.document_context,
    )
    sentences, counts = read_words(settings.input, settings.text)
    if settings.document_context and not sentences.has_documents:
        raise ValueError(
            f"--document-context: without effect: no -DOCSTART- line in {settings.input} says which"
            " sentences belong together; leave it out"
        )
    with Progress("features", unit="rows") as progress:
        extract_features(predictor, sentences, counts, extraction, out, progress.update)
    written = bertsmith.open_features(out)
    size = "x".join(map(str, written.vectors.shape))
    print(
        f"{out}: {len(written):,} texts, {len(sentences.words):,} words, float16 {size}, "
        f"{scaled(written.vectors.nbytes)}, layers {', '.join(map(str, extraction.numbers))}"
    )


@dataclass(frozen=True, kw_only=True)
class FeaturesNer(FrozenSettings):
    """Tag words over a frozen model with a BiLSTM: the six rows of the paper's Table 7.

    Examples:
      bertsmith features ner --data conll2003 --model bert-base-cased --out runs/table7
      bertsmith features ner --data conll2003 --model run --out t7 --rows last concat-last-four
      bertsmith features ner --data conll2003 --model run --out t7-all --sentences 0 --seeds 1..5

    The model's states of every word are computed once; each row then trains a two-layer BiLSTM over
    other layers of them (paper section 5.3). The table of entity F1 is also in OUT/table.md. The
    same command again goes on where it was stopped; more rows or seeds are added to what is there.
    """

    data: Path
    """Folder with train, dev and test files in CoNLL columns, .jsonl or .parquet."""
    model: str
    """A run, a Hugging Face folder or hub name."""
    out: Path
    """Run directory to write, or to go on with."""
    rows: tuple[str, ...] = tuple(ROWS)
    """Which rows of the table."""
    seeds: str = "1"
    """Seeds, such as 1,2,3 or 1..5."""
    given: Annotated[tuple[str, ...], Hidden] = ()


def run_features_ner(settings: FeaturesNer) -> None:
    seeds = parse_seeds(settings.seeds)
    from bertsmith.checkpoints.hub import open_model_folder
    from bertsmith.checkpoints.reading import load_tokenizer
    from bertsmith.tasks.tagging.summary import case_warning
    from bertsmith.tasks.task import find_task
    from bertsmith.text.readers.tables import digest
    from bertsmith.training.finetuning.feature_tagger import feature_table, table
    from bertsmith.training.finetuning.settings import Provenance
    from bertsmith.training.finetuning.task_types.base import read_data
    from bertsmith.training.finetuning.task_types.tagging import Tag

    check_folder(settings.out)
    folder, task, task_type = open_model_folder(settings.model), find_task("ner"), Tag()
    train, dev, record = read_data(task_type, task, settings.data)
    data = {"train": train, **dev}
    if "tokens_per_window" in settings.given:
        check_tokens_per_window(
            settings.tokens_per_window, settings.document_context, *data.values()
        )
    if test := task_type.find_file(task, settings.data, "test"):
        data["test"] = task_type.read(test, task, task_type.label_names(train))
        record["data_sha256"]["test"] = digest(test)
    print(task_type.summarize(train, data["dev"]), file=sys.stderr)
    if warning := case_warning(train, load_tokenizer(folder).normalization):
        print(warning, file=sys.stderr)
    own, made_of = (
        group_values(settings, FrozenSettings),
        Provenance(["bertsmith", *sys.argv[1:]], record),
    )
    result = feature_table(folder, data, settings.rows, seeds, own, settings.out, made_of)
    for line in table(result):
        print(line)
