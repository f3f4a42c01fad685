"""The programs that a model is exported to: each writes files, which engines/exported.py opens."""

# pyright: reportMissingImports=false
# the packages are extras

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from bertsmith.inference.engines.exported import PROGRAMS, Feeds, Program

if TYPE_CHECKING:
    from onnx import ModelProto

Precision = Literal["float32", "int8", "bf16"]
CALIBRATION_ROWS = 300
QUANTIZED = "bert.encoder.layer."  # heads are small, and stay in float


class Target(NamedTuple):
    """One program."""

    name: str
    packages: tuple[str, ...]
    program: Program
    """Opens the files again."""
    write: Callable[[ModelProto, Path, Precision, Sequence[str], Sequence[Feeds]], None]
    """Writes a model's files: (model, path, precision, names of products that stay in float, rows
    that calibrate int8 where that needs it)."""

    def check_installed(self) -> None:
        """Errors: ModuleNotFoundError that names the extra."""
        for package in self.packages:
            if find_spec(package) is None:
                raise ModuleNotFoundError(
                    f"{package} is not installed: pip install 'bertsmith[{self.name}]'",
                    name=package,
                )


def write_onnx(
    model: ModelProto, path: Path, precision: Precision, kept: Sequence[str], rows: Sequence[Feeds]
) -> None:
    """Write for ONNX Runtime, and transformers.js, which has it in the browser."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if precision == "float32":
        path.write_bytes(model.SerializeToString())
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet(""):
        quantize_dynamic(
            model,
            path,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=[*kept, *_outside(model)],
            extra_options={"MatMulConstBOnly": True},
        )


def write_openvino(
    model: ModelProto, path: Path, precision: Precision, kept: Sequence[str], rows: Sequence[Feeds]
) -> None:
    """Write for OpenVINO, Intel's, on a CPU."""
    import openvino

    path.parent.mkdir(parents=True, exist_ok=True)
    converted = openvino.convert_model(io.BytesIO(model.SerializeToString()))
    if precision == "int8":
        import nncf

        present = {node.get_friendly_name() for node in converted.get_ops()}
        assert present.issuperset(kept)
        # a last product whose bias is 0 has the name of its output
        outputs = (output.name for output in model.graph.output)
        ignored = [n for n in (*kept, *_outside(model), *outputs) if n in present]
        with _quiet("nncf"):
            converted = nncf.quantize(
                converted,
                nncf.Dataset([dict(row) for row in rows]),
                subset_size=CALIBRATION_ROWS,
                model_type=nncf.ModelType.TRANSFORMER,
                ignored_scope=nncf.IgnoredScope(names=ignored),
            )
    # bf16 is how a processor multiplies, not a file's: 16 bits hold the weights in both
    openvino.save_model(converted, path, compress_to_fp16=precision == "bf16")


TARGETS = {
    "onnx": Target("onnx", ("onnx", "onnxruntime"), PROGRAMS["onnx"], write_onnx),
    "openvino": Target(
        "openvino", ("onnx", "openvino", "nncf"), PROGRAMS["openvino"], write_openvino
    ),
}


def _outside(model: ModelProto) -> list[str]:
    """Products with weights that are not of the encoder's layers."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [
        node.name
        for node in model.graph.node
        if node.op_type == "MatMul"
        and (node.input[1] in weights or node.name == "cls.predictions.decoder")
        and not node.name.startswith(QUANTIZED)
    ]


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Keep a library's advice on its own use, and its bars, off the terminal."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        log.setLevel(before)
