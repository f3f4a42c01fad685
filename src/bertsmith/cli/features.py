"""Write a vector for every word of a file, out of any layers of a model.

Examples:
    bertsmith features news.txt --model run --out vectors
    bertsmith features ner/train.conll --model run --out vectors --layers=-4..-1 --document-context
    bertsmith features reviews.csv --text body --model run --out v --layers all --pool none

INPUT is .txt (a text a line), a table with --text (.csv, .tsv, .jsonl, .parquet), .jsonl or
.parquet with {"tokens": [...]} or, under any other suffix, CoNLL columns; text may be packed (.gz,
.xz, .zst).
The folder OUT holds a memory-mapped float16 array and where each text lies in it;
`bertsmith.open_features(OUT)[k]` are the vectors of text k.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass
class Features:
    input: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="INPUT")]
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
    """A word's vector: of its first piece, or the mean of its pieces; pieces: one a piece."""
    text: str | None = None
    """Column with the text of a table. Default: text."""
    document_context: bool = False
    """CoNLL columns with -DOCSTART- lines: fill each row with what stands around its sentence in
    the document (slower)."""
    max_length: int | None = None
    """Tokens of a row; longer texts are read in overlapping windows. Default: at most 512."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU when there is one."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """bf16 is a little less exact; auto: bf16 where some rows show it faster, and off by less than
    3%, else float32."""


def run_features(settings: Features) -> None:
    from bertsmith.cli.outputs import check_new_folder
    from bertsmith.inference.feature_store import open_features
    from bertsmith.inference.features import Extraction, extract_features, parse_layers
    from bertsmith.inference.predictor import load
    from bertsmith.progress import Progress
    from bertsmith.tasks.layout import Layout
    from bertsmith.tasks.tagging_files import read_words

    out = settings.out
    check_new_folder(out)
    predictor = load(settings.model, device=settings.device, precision=settings.precision)
    positions = predictor.config.max_positions
    extraction = Extraction(
        parse_layers(settings.layers, predictor.config.num_layers),
        settings.pool,
        settings.align,
        Layout(
            max_length=settings.max_length or min(512, positions),
            document_context=settings.document_context,
        ),
    )
    sentences, counts = read_words(settings.input, settings.text)
    if settings.document_context and not sentences.has_documents:
        raise ValueError(
            f"--document-context: without effect: no -DOCSTART- line in {settings.input} says which"
            " sentences belong together; leave it out"
        )
    with Progress("features", unit="rows") as progress:
        extract_features(predictor, sentences, counts, extraction, out, progress.update)
    written = open_features(out)
    size = "x".join(map(str, written.vectors.shape))
    print(
        f"{out}: {len(written):,} texts, {len(sentences.words):,} words, float16 {size}, "
        f"{written.vectors.nbytes / 1e6:,.1f} MB, layers {', '.join(map(str, extraction.layers))}"
    )
