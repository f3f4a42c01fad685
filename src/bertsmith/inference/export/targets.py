"""The programs that a model is exported to: each writes files, which engines/exported.py opens."""

# pyright: reportMissingImports=false
# the packages are extras

from __future__ import annotations

import io
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from bertsmith.inference.engines.exported import PROGRAMS, Feeds, Program

if TYPE_CHECKING:
    from onnx import ModelProto

Precision = Literal["float32", "int8", "bf16"]
CALIBRATION_ROWS = 300
QUANTIZED = "bert.encoder.layer."  # heads are small, and stay in float


class Target(ABC):
    """One program. `kept` are names of products that stay in float."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    program: ClassVar[Program]  # opens the files again

    def check_installed(self) -> None:
        """Errors: ModuleNotFoundError that names the extra."""
        for package in self.packages:
            if find_spec(package) is None:
                raise ModuleNotFoundError(
                    f"{package} is not installed: pip install 'bertsmith[{self.name}]'",
                    name=package,
                )

    @abstractmethod
    def write(
        self,
        model: ModelProto,
        path: Path,
        precision: Precision,
        kept: Sequence[str] = (),
        rows: Sequence[Feeds] = (),
    ) -> None:
        """Write the files; `rows` calibrate int8, where that needs it."""


class Onnx(Target):
    """ONNX Runtime, and transformers.js, which has it in the browser."""

    name = "onnx"
    packages = ("onnx", "onnxruntime")
    program = PROGRAMS["onnx"]

    def write(
        self,
        model: ModelProto,
        path: Path,
        precision: Precision,
        kept: Sequence[str] = (),
        rows: Sequence[Feeds] = (),
    ) -> None:
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


class OpenVino(Target):
    """OpenVINO, Intel's, on a CPU."""

    name = "openvino"
    packages = ("onnx", "openvino", "nncf")
    program = PROGRAMS["openvino"]

    def write(
        self,
        model: ModelProto,
        path: Path,
        precision: Precision,
        kept: Sequence[str] = (),
        rows: Sequence[Feeds] = (),
    ) -> None:
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


TARGETS: dict[str, Target] = {target.name: target for target in (Onnx(), OpenVino())}


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
