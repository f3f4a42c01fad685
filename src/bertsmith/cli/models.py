"""Commands: convert, export, serve, extend-positions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from bertsmith.base.settings import Metavar, Positional, Seed, check_bounds
from bertsmith.cli.flags import Answering
from bertsmith.serving.settings import ServingSettings


@dataclass
class Convert:
    """Write any model that bertsmith opens as one clean folder of another program, and prove it.

    Examples:
      bertsmith convert runs/books models/books
      bertsmith convert google/bert_uncased_L-4_H-256_A-4 models/mini
      bertsmith convert distilbert/distilbert-base-uncased@main models/distil
      bertsmith convert uncased_L-12_H-768_A-12 models/base
      bertsmith convert runs/books models/books-tf --to tensorflow

    SRC is a BERT, DistilBERT, ELECTRA or GPT; NAME@REVISION is a branch, tag or commit of a hub
    model. Old tensor names, shards, pickled and half-precision weights become one float32
    model.safetensors with today's names. The result is opened again and its tensors are compared
    bit by bit with SRC's. Tensors that SRC lacks are listed, not invented; so are those that DST
    has no place for.
    """

    source: Annotated[str, Positional, Metavar("SRC")]
    """Run directory, Hugging Face folder, folder of google-research/bert or of OpenAI's GPT, or hub
    name (NAME or NAME@REVISION)."""
    destination: Annotated[Path, Positional, Metavar("DST")]
    """Folder to write; it must be new or empty."""
    to: Literal["hugging-face", "tensorflow"] = "hugging-face"
    """tensorflow: bert_config.json and a checkpoint, as google-research/bert has them."""


def run_convert(settings: Convert) -> None:
    from bertsmith.checkpoints.config_json import read_config
    from bertsmith.checkpoints.convert import convert
    from bertsmith.checkpoints.hub import open_model_folder
    from bertsmith.cli.outputs import check_new_folder

    destination = settings.destination
    check_new_folder(destination, "DST")
    source = open_model_folder(settings.source)
    converted = convert(source, destination, settings.to)
    print(
        f"{destination}: {converted.architecture}, {converted.num_tensors} tensors, "
        f"{converted.num_parameters:,} parameters, opened again and found equal bit by bit"
    )
    if settings.to == "tensorflow" and read_config(source).activation == "gelu":
        print(
            "its GELU is exact: google-research/bert computes the tanh approximation in its place"
        )
    for name in converted.missing:
        print(f"missing from {settings.source}, not written: {name}")
    for name in converted.unused:
        print(f"unused, not written: {name}")


@dataclass
class Export:
    """Write a model for ONNX Runtime or OpenVINO, and keep it if it answers like the model.

    Examples:
      bertsmith export runs/reviews --to onnx
      bertsmith export runs/reviews --to onnx --out reviews-onnx
      bertsmith export runs/reviews --to onnx --int8 --dev dev.csv --out reviews-int8
      bertsmith export runs/pairs --to openvino --bf16 --dev texts.txt --out pairs-openvino

    The files are run on the dev data beside the model in float32: share of equal answers, largest
    difference, the task's metric with its interval, size and time are printed and written beside
    the file, as .json. int8 that loses more than --max-drop is tried again with some products in
    float, those behind GELU first; if that does not help, nothing is kept.
    """

    model: Annotated[str, Positional]
    """Run directory, Hugging Face folder or hub name."""
    to: Literal["onnx", "openvino"]
    """onnx: OUT/onnx/model.onnx (int8: model_quantized.onnx); openvino:
    OUT/openvino/openvino_model.xml."""
    out: Path | None = None
    """Folder to write, new or empty, which sentence-transformers, optimum and transformers.js open.
    Default: the files go into the model's own folder, for --engine."""
    int8: bool = False
    """Weights and inputs of the layers' products in 8 bits."""
    bf16: bool = False
    """Products in bf16, weights of 16 bits; OpenVINO alone."""
    dev: Path | None = None
    """Data to compare on: of the task, or texts for a model without one. Default: the run's own dev
    set."""
    max_drop: float = 0.01
    """Most that the main metric may lose (without labels: the share of equal answers)."""


def run_export(settings: Export) -> None:
    import bertsmith
    from bertsmith.checkpoints.hub import open_model_folder

    report = bertsmith.export(**vars(settings))
    first, *others = report.lines()
    # a name on the hub has its folder in the hub's cache
    print(f"{settings.out or open_model_folder(settings.model)}/{first}", *others, sep="\n")


@dataclass(frozen=True, kw_only=True)
class Serve(ServingSettings, Answering):
    """Serve models over HTTP, with a page to look at what they do.

    Examples:
      bertsmith serve runs/reviews
      bertsmith serve runs/reviews --precision int8 --port 9000
      bertsmith serve film=runs/reviews books=runs/books vectors=hub/name --host 0.0.0.0 \\
        --api-key-file keys.txt

    The page is at /, the description of all routes at /openapi.json. Clients of OpenAI's
    embeddings, of text-embeddings-inference and of Cohere's rerank work unchanged. SIGHUP reads the
    folders anew without a lost request, SIGTERM ends after the last answer.
    """

    common = ("port", "host", "precision", "api_key_file")

    models: Annotated[list[str], Positional, Metavar("[NAME=]MODEL...")]
    """Run directories, Hugging Face folders or hub names, each with the name that requests give;
    by default the folder's. Requests that name none get the first that was made for them, or else
    can do them."""
    precision: Literal["float32", "bf16", "int8"] = "float32"
    """bf16 and int8 are quicker and less exact."""


def run_serve(settings: Serve) -> None:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from bertsmith.inference.engines.processor import choose_processor
    from bertsmith.serving.server import serve

    models: dict[str, str] = {}
    for given in settings.models:
        name, _, folder = ("", "", given) if Path(given).exists() else given.rpartition("=")
        name = name or Path(folder).resolve().name
        if name in models:
            raise ValueError(
                f"{given}: a second model of the name {name}: name it, {name}2={folder}"
            )
        models[name] = folder
    # to look for a GPU starts CUDA, which workers that are forked later could not use
    with ProcessPoolExecutor(1, get_context("fork")) as elsewhere:
        processor = elsewhere.submit(choose_processor, *settings.machine).result()
    serve(models, processor, settings)


@dataclass
class ExtendPositions:
    """Let a model read longer rows: more rows of its position embedding.

    Examples:
      bertsmith extend-positions runs/books --positions 1024 --out longer

    The new positions know nothing yet. Train on before you use them:

      bertsmith pretrain --corpus store --config continue --model longer --max-length 1024 ...
    """

    arguments = {"max_positions": "positions"}  # of the library's `ModelConfig`

    model: Annotated[str, Positional]
    """Model to extend: a run, a Hugging Face folder or hub name."""
    positions: int
    """Tokens of the longest row that the new model reads."""
    out: Path
    """Folder for the extended model; it must be new or empty."""
    seed: Annotated[int, Seed] = 1
    """Seed of the new rows, drawn with the mean and standard deviation of the old ones."""

    def __post_init__(self) -> None:
        check_bounds(self)


def run_extend_positions(settings: ExtendPositions) -> None:
    import torch

    from bertsmith.checkpoints.convert import extend_positions
    from bertsmith.checkpoints.hub import open_model_folder
    from bertsmith.cli.outputs import check_new_folder

    out = settings.out
    check_new_folder(out)
    generator = torch.Generator().manual_seed(settings.seed)
    folder = open_model_folder(settings.model)
    before = extend_positions(folder, out, settings.positions, generator)
    print(
        f"{out}: {settings.positions:,} positions, {before:,} before; train it on with"
        f" `bertsmith pretrain --model {out} --max-length {settings.positions}` before you use it"
    )
