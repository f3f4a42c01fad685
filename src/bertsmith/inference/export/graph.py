"""A model written down as an ONNX graph, node by node, from its tensors.

Tensors have the names of transformers' BERT, and every matrix product that of its module, such as
bert.encoder.layer.0.output.dense: so quantization can be told which to leave out. Batch and length
are open. Inputs and outputs are called as optimum calls them.

Letters as in model/encoder.py.
"""

# pyright: reportMissingImports=false
# the packages are extras

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from bertsmith.base import VERSION
from bertsmith.inference.engines.exported import Head, input_names
from bertsmith.model.config import ModelConfig

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 20  # the first with Gelu
IR_VERSION = 10  # what onnxruntime 1.18 and later read
MASKED = -1e9  # a score that no softmax sees; bf16 and float32 both hold it
LARGEST = 2**31 - 2**20  # bytes of a protobuf message, and room for the nodes
OUTPUTS = {  # names and dimensions
    "encoder": {"last_hidden_state": ("batch", "length", "hidden")},
    "masked-lm": {"logits": ("batch", "length", "vocabulary")},
    "sequence": {"logits": ("batch", "labels")},
    "choice": {"logits": ("batch", "options")},
    "token": {"logits": ("batch", "length", "labels")},
    "span": {"start_logits": ("batch", "length"), "end_logits": ("batch", "length")},
}
POOLING = {"bert": "Tanh", "distilbert": "Relu", "electra": "Gelu"}


def onnx_model(tensors: Mapping[str, np.ndarray], config: ModelConfig, head: Head) -> ModelProto:
    """The ONNX model of tensors by their canonical names (checkpoints/names.py), float32.

    Errors: ValueError for more than the 2 GB that one file of ONNX holds.
    """
    return Graph(tensors, config).made(head)


class Graph:
    """Nodes, and the tensors that they read; a method adds nodes and names their output."""

    def __init__(self, tensors: Mapping[str, np.ndarray], config: ModelConfig) -> None:
        self.tensors, self.config = tensors, config
        self.nodes: list = []
        self.read: dict[str, np.ndarray] = {}

    def made(self, head: Head) -> ModelProto:
        from onnx import TensorProto, checker, helper, numpy_helper

        rows = ("batch", "options", "length") if head == "choice" else ("batch", "length")
        outputs = self.head(head, self.encoder(head == "choice"))
        names = OUTPUTS[head]
        for made, name in zip(outputs, names, strict=True):
            self.add("Identity", made, name=name)
        size = sum(array.nbytes for array in self.read.values())
        if size > LARGEST:
            raise ValueError(f"{size / 1e9:.1f} GB of weights: a file of ONNX holds 2 GB at most")
        graph = helper.make_graph(
            self.nodes,
            "bertsmith",
            [
                helper.make_tensor_value_info(name, TensorProto.INT64, rows)
                for name in input_names(self.config)
            ],
            [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)
                for name, sizes in names.items()
            ],
            [numpy_helper.from_array(array, name) for name, array in self.read.items()],
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="bertsmith",
            producer_version=VERSION,
        )
        checker.check_model(model, full_check=True)
        return model

    # --- the small words

    def add(self, operator: str, *inputs: str, name: str = "", **attributes: object) -> str:
        """A node with one output, which has its name."""
        from onnx import helper

        name = name or f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def constant(self, value: list[int] | int | float) -> str:
        """Whole numbers int64, others float32."""
        name = f"constant_{re.sub(r'[^0-9.e-]+', '_', str(value))}"
        is_real = isinstance(value, float)
        self.read[name] = np.array(value, np.float32 if is_real else np.int64)
        return name

    def tensor(self, name: str) -> str:
        """One of the model's, as it is."""
        self.read[name] = np.ascontiguousarray(self.tensors[name], np.float32)
        return name

    def linear(self, module: str, x: str) -> str:
        """x W^T + b; the product has the module's name, and W is stored as [inputs, outputs]."""
        turned = f"{module}.weight.T"
        self.read[turned] = np.ascontiguousarray(self.tensors[f"{module}.weight"].T, np.float32)
        product = self.add("MatMul", x, turned, name=module)
        return self.add("Add", product, self.tensor(f"{module}.bias"))

    def norm(self, module: str, x: str) -> str:
        """LayerNorm over the last dimension."""
        scale, bias = self.tensor(f"{module}.weight"), self.tensor(f"{module}.bias")
        eps = self.config.layer_norm_eps
        return self.add("LayerNormalization", x, scale, bias, axis=-1, epsilon=eps)

    def gelu(self, x: str) -> str:
        how = "tanh" if self.config.activation == "gelu_tanh" else "none"
        return self.add("Gelu", x, approximate=how)

    # --- the encoder

    def encoder(self, has_options: bool) -> str:
        """Hidden states [B, S, H]; of options [B, N, S] all are rows."""
        config = self.config
        names = input_names(config)
        self.rows = dict(zip(names, names, strict=True))
        if has_options:
            length = self.add("Shape", "input_ids", start=2, end=3)
            shape = self.add("Concat", self.constant([-1]), length, axis=0)
            self.rows = {name: self.add("Reshape", name, shape) for name in names}
        self.length = self.add("Shape", self.rows["input_ids"], start=1, end=2)
        self.mask = self.attention_mask()
        x = self.embeddings()
        for number in range(config.num_layers):
            x = self.layer(f"bert.encoder.layer.{number}.", x)
        return self.norm("bert.encoder.final_norm", x) if config.pre_norm else x

    def embeddings(self) -> str:
        """The sum of the tables' rows, LayerNorm, and what brings it to the hidden size."""
        own = "bert.embeddings."
        x = self.add("Gather", self.tensor(f"{own}word_embeddings.weight"), self.rows["input_ids"])
        if types := self.rows.get("token_type_ids"):
            table = self.tensor(f"{own}token_type_embeddings.weight")
            x = self.add("Add", x, self.add("Gather", table, types))
        table, zero = self.tensor(f"{own}position_embeddings.weight"), self.constant([0])
        x = self.add("Add", x, self.add("Slice", table, zero, self.length, zero))
        x = self.norm(f"{own}LayerNorm", x)
        project = f"{own}project"
        return self.linear(project, x) if f"{project}.weight" in self.tensors else x

    def attention_mask(self) -> str:
        """The term added to the scores: [B, 1, 1, S], of a causal model [B, 1, S, S]."""
        from onnx import TensorProto

        seen = self.add("Cast", self.rows["attention_mask"], to=TensorProto.BOOL)
        seen = self.add("Unsqueeze", seen, self.constant([1, 2]))
        if self.config.causal:
            zero, one = self.constant(0), self.constant(1)
            last = self.add("Squeeze", self.length)
            columns = self.add("Range", zero, last, one)
            rows = self.add("Unsqueeze", columns, self.constant([1]))
            seen = self.add("And", seen, self.add("LessOrEqual", columns, rows))
        return self.add("Where", seen, self.constant(0.0), self.constant(MASKED))

    def layer(self, own: str, x: str) -> str:
        """Self-attention, then feed-forward, each with its residual; see `Layer` and `PreNorm`."""
        norms = f"{own}attention.output.LayerNorm", f"{own}output.LayerNorm"
        for norm, sublayer in zip(norms, (self.attention, self.feed_forward), strict=True):
            if self.config.pre_norm:
                x = self.add("Add", x, sublayer(own, self.norm(norm, x)))
            else:
                x = self.norm(norm, self.add("Add", x, sublayer(own, x)))
        return x

    def attention(self, own: str, x: str) -> str:
        """The attention of all heads, and its output layer."""
        heads, size = self.config.num_heads, self.config.hidden_size
        shape = self.constant([0, 0, heads, size // heads])

        def parted(name: str, order: tuple[int, ...]) -> str:
            rows = self.add("Reshape", self.linear(f"{own}attention.self.{name}", x), shape)
            return self.add("Transpose", rows, perm=order)

        query, key = parted("query", (0, 2, 1, 3)), parted("key", (0, 2, 3, 1))
        scale = self.constant((size // heads) ** -0.5)
        scores = self.add("Mul", self.add("MatMul", query, key), scale)
        weights = self.add("Softmax", self.add("Add", scores, self.mask), axis=-1)
        context = self.add("MatMul", weights, parted("value", (0, 2, 1, 3)))
        context = self.add("Transpose", context, perm=(0, 2, 1, 3))
        context = self.add("Reshape", context, self.constant([0, 0, size]))
        return self.linear(f"{own}attention.output.dense", context)

    def feed_forward(self, own: str, x: str) -> str:
        if self.config.gated:
            gate = self.gelu(self.linear(f"{own}intermediate.gate", x))
            wide = self.add("Mul", gate, self.linear(f"{own}intermediate.up", x))
        else:
            wide = self.gelu(self.linear(f"{own}intermediate.dense", x))
        return self.linear(f"{own}output.dense", wide)

    # --- heads

    def head(self, head: Head, x: str) -> list[str]:
        """The outputs of a head, as `OUTPUTS` names them."""
        if head == "encoder":
            return [x]
        if head == "masked-lm":
            return [self.masked_lm(x)]
        if head == "token":
            return [self.linear("classifier", x)]
        if head == "span":
            logits = self.linear("qa_outputs", x)
            return [self.add("Gather", logits, self.constant(k), axis=2) for k in (0, 1)]
        pooled = self.add(
            POOLING[self.config.family], self.linear("bert.pooler.dense", self.cls(x))
        )
        logits = self.linear("classifier", pooled)
        if head == "choice":
            shape = self.add("Shape", "input_ids", start=0, end=2)
            logits = self.add("Reshape", logits, shape)
        return [logits]

    def cls(self, x: str) -> str:
        """The token that a class is read at: [CLS], in a causal model the last one. [B, H]."""
        if not self.config.causal:
            return self.add("Gather", x, self.constant(0), axis=1)
        count = self.add("ReduceSum", self.rows["attention_mask"], self.constant([1]), keepdims=1)
        return self.add("GatherND", x, self.add("Sub", count, self.constant(1)), batch_dims=1)

    def masked_lm(self, x: str) -> str:
        """Logits of all pieces; the output matrix is the token table, which is stored once."""
        own, table = "cls.predictions.", "bert.embeddings.word_embeddings.weight"
        x = self.norm(
            f"{own}transform.LayerNorm", self.gelu(self.linear(f"{own}transform.dense", x))
        )
        turned = self.add("Transpose", self.tensor(table), perm=(1, 0))
        product = self.add("MatMul", x, turned, name="cls.predictions.decoder")
        return self.add("Add", product, self.tensor(f"{own}bias"))
