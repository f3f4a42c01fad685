"""The paper's formulas in float64 NumPy, on a checkpoint's arrays under Google's names.

google-research/bert modeling.py: post-LayerNorm layers, GELU by its tanh approximation.
"""

import numpy as np


class Reference:
    def __init__(self, arrays, config):
        self.arrays = {name: np.float64(values) for name, values in arrays.items()}
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]

    def dense(self, x, name):
        return x @ self.arrays[f"{name}/kernel"] + self.arrays[f"{name}/bias"]

    def norm(self, x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * self.arrays[f"{name}/gamma"] + self.arrays[f"{name}/beta"]

    def hidden(self, ids, types, lengths):
        """[B, S, H] after the last layer."""
        table, (rows, length) = "bert/embeddings", ids.shape
        x = self.arrays[f"{table}/word_embeddings"][ids]
        x = x + self.arrays[f"{table}/position_embeddings"][:length]
        x = x + self.arrays[f"{table}/token_type_embeddings"][types]
        x = self.norm(x, f"{table}/LayerNorm")
        seen = np.arange(length) < lengths[:, None]
        for layer in range(self.layers):
            name = f"bert/encoder/layer_{layer}"
            query, key, value = (
                self.dense(x, f"{name}/attention/self/{part}")
                .reshape(rows, length, self.heads, -1)
                .swapaxes(1, 2)
                for part in ("query", "key", "value")
            )
            scores = query @ key.swapaxes(2, 3) / np.sqrt(query.shape[-1])
            scores = np.where(seen[:, None, None], scores, -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            read = (shares / shares.sum(-1, keepdims=True) @ value).swapaxes(1, 2).reshape(x.shape)
            part = self.dense(read, f"{name}/attention/output/dense")
            x = self.norm(x + part, f"{name}/attention/output/LayerNorm")
            wide = gelu(self.dense(x, f"{name}/intermediate/dense"))
            x = self.norm(x + self.dense(wide, f"{name}/output/dense"), f"{name}/output/LayerNorm")
        return x

    def head(self, x, name):
        """A linear layer whose matrix is [outputs, H]."""
        weights, bias = self.arrays[f"{name}output_weights"], self.arrays[f"{name}output_bias"]
        return x @ weights.T + bias

    def pooled(self, hidden):
        return np.tanh(self.dense(hidden[:, 0], "bert/pooler/dense"))

    def masked_lm(self, hidden):
        """[..., H] -> [..., V]."""
        name = "cls/predictions"
        x = self.norm(
            gelu(self.dense(hidden, f"{name}/transform/dense")), f"{name}/transform/LayerNorm"
        )
        table = self.arrays["bert/embeddings/word_embeddings"]
        return x @ table.T + self.arrays[f"{name}/output_bias"]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
