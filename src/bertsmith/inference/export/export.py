"""A model's files for another program, kept if they answer like the model: `bertsmith.export`."""

# pyright: reportMissingImports=false
# the packages are extras

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from bertsmith.base.files import TEMPORARY_PREFIX, atomic_folder, check_new, sync, write_json
from bertsmith.base.settings import NotNegative, checked
from bertsmith.base.terminal import Progress
from bertsmith.checkpoints.config_json import CONFIG_FILE, config_entries, read_stored_config
from bertsmith.checkpoints.model_folder import (
    beyond_transformers,
    copy_similarity_training,
    model_class,
    whole_tokenizer,
)
from bertsmith.inference.engines.exported import Feeds, record_file, size_of, weight_digests
from bertsmith.inference.engines.processor import ENGINES
from bertsmith.inference.export.comparison import (
    ExportRefused,
    ExportReport,
    check_report,
    measure,
    measure_speed,
)
from bertsmith.inference.export.graph import onnx_model
from bertsmith.inference.export.subject import Subject, find_subject
from bertsmith.inference.export.targets import (
    CALIBRATION_ROWS,
    QUANTIZED,
    TARGETS,
    Precision,
    Target,
)
from bertsmith.inference.predictor import Predictor, load
from bertsmith.text.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from onnx import ModelProto

FEED_FORWARD = ".output.dense"  # its inputs, behind GELU, have the largest outliers
RANKED_ROWS = 16
ADVICE = {  # for programs that open the file
    "float32": "OpenVINO computes in bf16 where a processor has it: open the file with "
    "INFERENCE_PRECISION_HINT f32 for these numbers",
    "bf16": "the file holds weights of 16 bits; open it with INFERENCE_PRECISION_HINT bf16",
}


@checked()
def export(
    model: str | Path,
    out: str | Path | None = None,
    *,
    to: Literal["onnx", "openvino"],
    int8: bool = False,
    bf16: bool = False,
    dev: str | Path | None = None,
    max_drop: float = 0.01,
) -> ExportReport:
    """Write a model for ONNX Runtime or OpenVINO, and compare the files with the model.

        bertsmith.export("runs/reviews", "reviews-onnx", to="onnx", int8=True, dev="dev.csv")
        bertsmith.export("runs/reviews", to="openvino")  # for load(..., engine="openvino")

    The new folder `out` has the files where sentence-transformers, optimum and transformers.js look
    for them, the report beside them, and the tokenizer; without `out` the model's own folder gets
    files and report, in place of what was there. `dev` is data of the task, labelled or
    not, of a model without a task a file of texts; a run's own dev set where it is None, else
    random pieces, on which int8 cannot be judged. `max_drop` is the most that the main metric may
    lose (without labels: agreement). int8 that loses more is tried again with products in float.

    Errors: ExportRefused (a ValueError) when the files are worse than that; ValueError for a model
    that has no such file, int8 without data, bf16 for ONNX; ModuleNotFoundError.
    """
    if int8 and bf16:
        raise ValueError("`int8=True` and `bf16=True`: one of them at most")
    if not NotNegative.holds(max_drop):
        raise ValueError(f"`max_drop={max_drop}`: {NotNegative.words}")
    precision: Precision = "int8" if int8 else "bf16" if bf16 else "float32"
    target, out = TARGETS[to], None if out is None else Path(out)
    target.check_installed()
    if precision not in ENGINES[to]:
        raise ValueError(
            f"`{precision}=True`: ONNX Runtime has no {precision} products on a CPU: take int8, or "
            "`to='openvino'`"
        )
    if out:
        check_new(out)
    predictor = load(model, device="cpu")
    tokenizer = whole_tokenizer(predictor.folder)
    subject = find_subject(predictor, None if dev is None else Path(dev))
    if precision == "int8" and subject.source is None:
        raise ValueError(
            f"{predictor.folder}: int8 must be tried on texts: name a file of them, such as "
            "`dev='dev.csv'`"
        )
    with atomic_folder(out) if out else _into(predictor.folder) as temporary:
        report = _best(subject, target, temporary, precision, max_drop)
        if out:
            _write_beside(predictor, tokenizer, temporary)
        write_json(record_file(temporary / report.file), report.to_dict())
    return report


@contextmanager
def _into(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; on success its files go into `folder`, the record last."""
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=folder) as temporary:
        yield Path(temporary)
        files = [file for file in Path(temporary).rglob("*") if file.is_file()]
        files.sort(key=lambda file: file.suffix == ".json")
        places = [folder / file.relative_to(temporary) for file in files]
        places[-1].unlink(missing_ok=True)  # for as long as the files are not whole
        for file, place in zip(files, places, strict=True):
            sync(file)
            place.parent.mkdir(exist_ok=True)
            os.replace(file, place)


def _best(
    subject: Subject, target: Target, folder: Path, precision: Precision, max_drop: float
) -> ExportReport:
    """The first attempt that passes. Errors: ExportRefused, the last one's."""
    graph = onnx_model(subject.tensors(), subject.predictor.config, subject.head)
    path, threads = target.program.path(folder, precision), subject.predictor.processor.threads
    rows: list[Feeds] = []
    if precision == "int8":
        rows = subject.feeds(subject.some_rows(CALIBRATION_ROWS))
    advice = ADVICE.get(precision) if target.name == "openvino" else None
    refusal = None
    with Progress(f"export to {target.name}"):
        original = subject.original()
        for kept in _attempts(target, graph, precision, rows):
            target.write(graph, path, precision, kept, rows)
            session = target.program.open(path, precision, threads)
            report = ExportReport(
                file=str(path.relative_to(folder)),
                format=target.name,
                precision=precision,
                **measure(subject, session, original),
                bytes=size_of(path),
                model_sha256=weight_digests(subject.predictor.folder),
                speed=measure_speed(subject, session),
                threads=threads,
                kept_in_float=kept,
                advice=advice,
            )
            try:
                check_report(report, float(np.abs(original).max()), max_drop)
            except ExportRefused as error:
                refusal = error
            else:
                return report
        assert refusal is not None
        raise refusal


def _attempts(
    target: Target, graph: ModelProto, precision: Precision, rows: list[Feeds]
) -> Iterator[tuple[str, ...]]:
    """Names of the products that stay in float, ever more."""
    yield ()
    if precision != "int8":
        return
    ranked = rank_products(target, graph, rows[:: max(1, len(rows) // RANKED_ROWS)])
    wide = [name for name in ranked if _is_feed_forward_output(name)]
    others = [name for name in ranked if name not in wide]
    yield tuple(wide[: max(1, len(wide) // 4)])
    yield tuple(wide)
    yield (*wide, *others[: len(others) // 2])


def _is_feed_forward_output(name: str) -> bool:
    return name.endswith(FEED_FORWARD) and not name.endswith(f"attention{FEED_FORWARD}")


def rank_products(target: Target, graph: ModelProto, rows: list[Feeds]) -> list[str]:
    """The products of the layers, those first that lose most when their inputs are rounded.

    The loss is the squared error of a product whose inputs have 256 steps from the smallest to the
    largest of a row of tokens, as a part of its own square.
    """
    from onnx import ModelProto, helper, numpy_helper

    probe = ModelProto()
    probe.CopyFrom(graph)
    own = [node for node in probe.graph.node if node.op_type == "MatMul"]
    own = [node for node in own if node.name.startswith(QUANTIZED)]
    inputs = list(dict.fromkeys(node.input[0] for node in own))
    probe.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in inputs)
    weights = {w.name: numpy_helper.to_array(w) for w in probe.graph.initializer}
    first = len(graph.graph.output)
    lost, whole = (dict.fromkeys((node.name for node in own), 0.0) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        path = target.program.path(Path(folder), "float32")
        target.write(probe, path, "float32", (), ())
        session = target.program.open(path, "float32", 1)
        for feeds in rows:
            states = dict(zip(inputs, session(feeds)[first:], strict=True))
            for node in own:
                x, weight = states[node.input[0]], weights[node.input[1]]
                step = max(float(np.ptp(x)) / 255, 1e-20)
                error = np.rint(x / step) * step - x
                lost[node.name] += float(np.square(error @ weight).sum())
                whole[node.name] += float(np.square(x @ weight).sum())
        del session
    return sorted(lost, key=lambda name: -lost[name] / max(whole[name], 1e-20))


def _write_beside(predictor: Predictor, tokenizer: Tokenizer, folder: Path) -> None:
    """The files that other programs read beside the model's."""
    source, config = predictor.folder, predictor.config
    copy_similarity_training(source, folder)
    tokenizer.save(folder, config.max_positions, config.type_vocab_size > 0)
    own = bool(beyond_transformers(config, model_class(source)))
    write_json(folder / CONFIG_FILE, read_stored_config(source) | config_entries(config, own))
