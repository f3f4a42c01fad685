"""Write a vector for every text of a file.

Examples:
    bertsmith embed titles.txt --model pairs --out titles.npy --normalize
    bertsmith embed new.csv --text body --model run --out new.jsonl --whiten
    cat titles.txt | bertsmith embed - --model pairs --out titles.npy

A .txt file is a text a line; a .csv, .tsv, .jsonl or .parquet has one in the column --text.
Vectors of a model that was only pre-trained say little about similarity, and the command warns of
it: --whiten helps, and so does training (`bertsmith embed-train`).
What is done is kept in OUT.partial: after Ctrl-C or a kill the same command goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    import numpy as np

    from bertsmith.inference.embed import Reading
    from bertsmith.inference.predictor import Predictor

OUTPUTS = (".npy", ".jsonl")


@dataclass
class Embed:
    input: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="INPUT")]
    """File with the texts; - for standard input, a text a line."""
    model: str
    """Run directory, Hugging Face folder or hub name."""
    out: Path
    """.npy (float32, a row a text) or .jsonl ({"text", "vector"} a line)."""
    pool: Literal["mean", "cls", "max"] | None = None
    """Mean of the tokens, the vector at [CLS] or the tokens' largest values. Default: as trained,
    else mean."""
    prompt: str | None = None
    """Put this before every text, such as "query: ". Default: as trained, else nothing."""
    no_prompt: bool = False
    """Put nothing before a text, also where the model was trained otherwise."""
    normalize: bool = False
    """Make every vector of length 1, so that dot products are cosines. Default: as trained."""
    no_normalize: bool = False
    """Leave the vectors their lengths, also where the model was trained otherwise."""
    whiten: bool = False
    """Give the vectors mean 0 and equal, uncorrelated directions."""
    whitening_from: Path | None = None
    """Take mean and covariance from the texts of this file instead of INPUT."""
    dimensions: int | None = None
    """With --whiten: keep only so many directions, those of the largest variance."""
    text: str | None = None
    """Column with the text of a table, also of --whitening-from. Default: text."""
    max_length: int | None = None
    """Tokens of a text; longer ones are cut. Default: as trained, else all the model can read."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU when there is one."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """bf16 is a little less exact; auto: bf16 where some rows show it faster, and off by less than
    3%, else float32."""


def run_embed(settings: Embed) -> None:
    import numpy as np

    from bertsmith.files import atomic_file
    from bertsmith.finetuning.sentence_vectors import unit_length
    from bertsmith.inference.embed import Whitening, warning_of
    from bertsmith.inference.inputs import is_text, read_texts
    from bertsmith.inference.predictor import load

    check(settings)
    predictor = load(settings.model, device=settings.device, precision=settings.precision)
    reading = reading_for(settings, predictor.folder)
    unscaled = replace(reading, normalize=False)  # whitening comes before that

    # all is read, and refused if it must be, before the first vector is computed
    source, other = settings.input, settings.whitening_from
    has_table = not all(map(is_text, (source, other or source)))
    texts, others = (
        read_texts(file, None if has_table and is_text(file) else settings.text)[0] if file else []
        for file in (source, other)
    )
    if settings.whiten:
        size = predictor.config.hidden_size
        Whitening.check(len(others or texts), size, settings.dimensions)

    files = {str(source): texts} | ({str(other): others} if other else {})
    with vectors_of(predictor, files, unscaled, settings) as (vectors, *more):
        if settings.whiten:
            fitted = more[0] if more else vectors
            vectors = Whitening.fit(fitted, settings.dimensions).apply(vectors)
        if reading.normalize:
            vectors = unit_length(vectors)
        with atomic_file(settings.out) as temporary:
            if settings.out.suffix == ".npy":
                np.save(temporary, vectors)
            else:
                with temporary.open("w", encoding="utf-8", newline="") as file:
                    for text, vector in zip(texts, vectors.tolist(), strict=True):
                        file.write(json.dumps({"text": text, "vector": vector}) + "\n")
    print(f"{settings.out}: {len(vectors):,} vectors of {vectors.shape[1]} numbers")
    if warning := warning_of(predictor.folder, reading):
        print(f"warning: {warning}", file=sys.stderr)


@contextmanager
def vectors_of(
    predictor: Predictor, files: Mapping[str, list[str]], reading: Reading, settings: Embed
) -> Iterator[list[np.ndarray]]:
    """The vectors of each file's texts, kept beside --out until the block has used them.

    files: name -> texts.
    """
    import numpy as np

    from bertsmith.inference.embed import embed, settle_precision
    from bertsmith.inference.kept_blocks import BLOCK_CHARACTERS, job_of, kept_blocks, sorted_blocks
    from bertsmith.progress import Progress

    work = [
        (name, block)
        for name, texts in files.items()
        for block in sorted_blocks([len(text) + 1 for text in texts], BLOCK_CHARACTERS)
    ]
    sizes = [len(block) for _, block in work]
    read = (text.encode("utf-8", "surrogatepass") for texts in files.values() for text in texts)
    flags = (reading, settings.device, settings.precision)
    job = job_of([predictor.folder], read, sizes, predictor.tokenizer.fingerprint, *flags)
    with kept_blocks(settings.out, job, sizes, "texts") as kept:
        every = [text for texts in files.values() for text in texts]
        kept.settle([predictor], lambda model: settle_precision(model, every, reading))
        with Progress("embed", sum(sizes), "texts", start=kept.rows) as progress:

            def compute(number: int) -> tuple[np.ndarray, np.ndarray]:
                name, block = work[number]
                texts = [files[name][k] for k in block]
                vectors, cut = embed(predictor, texts, reading, progress.update)
                return vectors, np.array(cut)

            found = kept.arrays(compute)
        of_files = []
        for name, texts in files.items():
            vectors, cut = np.empty((len(texts), found[0][0].shape[1]), np.float32), 0
            for (of, block), (part, cut_in_part) in zip(work, found, strict=True):
                if of == name:
                    vectors[block] = part
                    cut += int(cut_in_part)
            if cut:
                print(f"{name}: {cut:,} of {len(texts):,} texts were cut", file=sys.stderr)
            of_files.append(vectors)
        yield of_files


def reading_for(settings: Embed, folder: Path) -> Reading:
    """How the texts are read, with a line on stderr where the model's folder decided it."""
    from bertsmith.inference.embed import reading_of, similarity_training

    reading = reading_of(
        folder,
        settings.pool,
        settings.max_length,
        "" if settings.no_prompt else settings.prompt,
        settings.normalize or (False if settings.no_normalize else None),
    )
    if similarity_training(folder):
        print(f"{folder}: {reading}", file=sys.stderr)
    return reading


def check(settings: Embed) -> None:
    """Errors: ValueError for flags that do not go together, and as `check_outputs`."""
    from bertsmith.cli.outputs import check_outputs

    if settings.out.suffix not in OUTPUTS:
        raise ValueError(f"{settings.out}: end --out in {' or '.join(OUTPUTS)}")
    check_outputs([Path(settings.input), settings.whitening_from], {"--out": settings.out})
    if settings.normalize and settings.no_normalize:
        raise ValueError("--normalize, --no-normalize: give one of them")
    if settings.prompt is not None and settings.no_prompt:
        raise ValueError("--prompt, --no-prompt: give one of them")
    for flag, value in (
        ("--whitening-from", settings.whitening_from),
        ("--dimensions", settings.dimensions),
    ):
        if value is not None and not settings.whiten:
            raise ValueError(f"{flag} {value}: only with --whiten")
