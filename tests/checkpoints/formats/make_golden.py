"""Writes the checkpoints in golden/ with TensorFlow: `python make_golden.py FOLDER`.

The files in the repository were written by TensorFlow 2.21.0. `google_bert` also serves the tests
that write models of other sizes.
"""

import json
import sys
from pathlib import Path

import numpy as np

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES += ["the", "cat", "sat", "##s", "on", "mat", "."]
SHAPE = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 8,
    "initializer_range": 0.02,
    "intermediate_size": 16,
    "max_position_embeddings": 12,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "type_vocab_size": 2,
    "vocab_size": len(PIECES),
}
HEADS = {  # name: {tensor: shape}; H is the hidden size, V the vocabulary's
    "pretraining": {
        "cls/predictions/transform/dense/kernel": "HH",
        "cls/predictions/transform/dense/bias": "H",
        "cls/predictions/transform/LayerNorm/gamma": "H",
        "cls/predictions/transform/LayerNorm/beta": "H",
        "cls/predictions/output_bias": "V",
        "cls/seq_relationship/output_weights": "2H",
        "cls/seq_relationship/output_bias": "2",
    },
    "classifier": {"output_weights": "3H", "output_bias": "3"},
    "squad": {"cls/squad/output_weights": "2H", "cls/squad/output_bias": "2"},
}


def google_bert(config, head, seed=1, std=0.3):
    """Random weights under google-research/bert's names; {name: float32 array}.

    The draws are uniform, which every version of NumPy makes alike, to the bit.
    """
    size, wide = config["hidden_size"], config["intermediate_size"]
    letters = {"H": size, "V": config["vocab_size"], "2": 2, "3": 3}
    shapes = {
        "bert/embeddings/word_embeddings": (config["vocab_size"], size),
        "bert/embeddings/position_embeddings": (config["max_position_embeddings"], size),
        "bert/embeddings/token_type_embeddings": (config["type_vocab_size"], size),
        "bert/embeddings/LayerNorm/gamma": (size,),
        "bert/embeddings/LayerNorm/beta": (size,),
        "bert/pooler/dense/kernel": (size, size),
        "bert/pooler/dense/bias": (size,),
    }
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "attention/self/query": (size, size),
            "attention/self/key": (size, size),
            "attention/self/value": (size, size),
            "attention/output/dense": (size, size),
            "intermediate/dense": (size, wide),
            "output/dense": (wide, size),
        }
        for part, shape in parts.items():
            shapes[f"bert/encoder/layer_{layer}/{part}/kernel"] = shape
            shapes[f"bert/encoder/layer_{layer}/{part}/bias"] = shape[1:]
        for part in ("attention/output/LayerNorm", "output/LayerNorm"):
            shapes[f"bert/encoder/layer_{layer}/{part}/gamma"] = (size,)
            shapes[f"bert/encoder/layer_{layer}/{part}/beta"] = (size,)
    shapes |= {name: tuple(letters[x] for x in shape) for name, shape in HEADS[head].items()}
    draws, width = np.random.RandomState(seed), 12**0.5 * std
    weights = {n: width * (draws.random_sample(s) - 0.5) for n, s in shapes.items()}
    return {n: (w + n.endswith("gamma")).astype(np.float32) for n, w in weights.items()}


def with_slots(weights, step):
    """The weights with Adam's state of google-research/bert optimization.py."""
    draws, slots = np.random.RandomState(step), {"global_step": np.int64(step)}
    for name, weight in weights.items():
        for slot, scale in (("adam_m", 1e-3), ("adam_v", 1e-5)):
            values = scale * draws.random_sample(weight.shape)
            slots[f"{name}/{slot}"] = values.astype(np.float32)
    return weights | slots


def various():
    """Arrays of many types, one of them kept in slices."""
    draws = np.random.RandomState(7)
    arrays = {
        kind: draws.randint(0, 100, (2, 3)).astype(kind)
        for kind in ("float64", "int32", "uint8", "int16", "int8", "int64", "float16", "uint16",
                     "uint32", "uint64")
    }  # fmt: skip
    arrays["bool"] = np.array([True, False, True])
    arrays["complex64"] = np.array([1 + 2j, 3 - 4j], np.complex64)
    arrays |= {"scalar": np.float32(1.5), "empty": np.zeros((0, 4), np.float32)}
    arrays["a/part"] = draws.random_sample((7, 200)).astype(np.float32)
    arrays["a/both"] = draws.random_sample((4, 6)).astype(np.float32)
    return arrays


SLICES = {  # array: what TensorFlow calls its slices
    "a/part": ["7 200 0,4:-", "7 200 4,3:-"],
    "a/both": ["4 6 0,2:0,3", "4 6 0,2:3,3", "4 6 2,2:-"],
}


def save(prefix, arrays, slices=None, bfloat16=None):
    """One checkpoint, as `tf.train.Saver` writes it."""
    import tensorflow as tf

    names, specs, tensors = [], [], []
    for name in sorted(arrays):
        for spec in (slices or {}).get(name, [""]):
            part = arrays[name]
            for axis, extent in enumerate(spec.split()[-1].split(":") if spec else ()):
                if extent != "-":
                    start, length = map(int, extent.split(","))
                    part = np.take(part, range(start, start + length), axis)
            names.append(name)
            specs.append(spec)
            tensors.append(tf.constant(part))
    if bfloat16:
        names.append(bfloat16)
        specs.append("")
        tensors.append(tf.cast([1.5, -2.0, 3.14159], tf.bfloat16))
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    tf.raw_ops.SaveV2(
        prefix=str(prefix), tensor_names=names, shape_and_slices=specs, tensors=tensors
    )


def save_shards(prefix, arrays):
    """A checkpoint of two files with tensors, as two parameter servers leave it."""
    import tensorflow as tf

    names = sorted(arrays)
    parts = [Path(f"{prefix}_temp_{k}") for k in range(2)]
    for k, part in enumerate(parts):
        save(part, {name: arrays[name] for name in names[k::2]})
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=[str(part) for part in parts], destination_prefix=str(prefix)
    )


def save_bert(folder, config, arrays, name="bert_model.ckpt"):
    """A folder as Google released them."""
    save(folder / name, arrays)
    (folder / "bert_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))


def main(folder):
    import tensorflow as tf

    pretraining = google_bert(SHAPE, "pretraining")
    save_bert(folder / "pretraining", SHAPE, with_slots(pretraining, 20), "model.ckpt-20")
    latest = 'model_checkpoint_path: "gs://somewhere/model.ckpt-20"\n'
    (folder / "pretraining" / "checkpoint").write_text(latest)
    for head in ("classifier", "squad"):
        save_bert(folder / head, SHAPE | {"num_hidden_layers": 1},
                  google_bert(SHAPE | {"num_hidden_layers": 1}, head))  # fmt: skip
    save(folder / "various", various(), SLICES, bfloat16="bfloat16")
    save_shards(folder / "shards", {f"name{k}": np.full(k, k, np.float32) for k in range(1, 8)})
    tf.train.Checkpoint(x=tf.Variable([1.0, 2.0])).write(str(folder / "objects"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
