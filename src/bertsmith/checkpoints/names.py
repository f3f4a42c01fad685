"""The one table of tensor names: ours, Hugging Face's, those of BERT's relatives, Google's.

A row of `HUGGING_FACE` names a module, whose tensors are `.weight` and `.bias` on both sides; `{n}`
is the number of a layer. The other direction, the split of the fused matrix and the names in
Google's checkpoints (`google_name`) follow from it. `OTHER_NAMES` has the modules that other models
than BERT call otherwise; BERT's names are the canonical ones, in which all else reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

HUGGING_FACE = {  # ours: theirs; several of theirs are concatenated along the rows of ours
    "encoder.embeddings.token": ["bert.embeddings.word_embeddings"],
    "encoder.embeddings.position": ["bert.embeddings.position_embeddings"],
    "encoder.embeddings.segment": ["bert.embeddings.token_type_embeddings"],
    "encoder.embeddings.norm": ["bert.embeddings.LayerNorm"],
    "encoder.embeddings.project": ["bert.embeddings.project"],  # ELECTRA, ELMo; a name of ours
    "encoder.layers.{n}.qkv": [
        "bert.encoder.layer.{n}.attention.self.query",
        "bert.encoder.layer.{n}.attention.self.key",
        "bert.encoder.layer.{n}.attention.self.value",
    ],
    "encoder.layers.{n}.attention_output": ["bert.encoder.layer.{n}.attention.output.dense"],
    "encoder.layers.{n}.attention_norm": ["bert.encoder.layer.{n}.attention.output.LayerNorm"],
    "encoder.layers.{n}.intermediate": ["bert.encoder.layer.{n}.intermediate.dense"],
    "encoder.layers.{n}.gate_up": [  # of a gated model, in place of intermediate; a name of ours
        "bert.encoder.layer.{n}.intermediate.gate",
        "bert.encoder.layer.{n}.intermediate.up",
    ],
    "encoder.layers.{n}.output": ["bert.encoder.layer.{n}.output.dense"],
    "encoder.layers.{n}.output_norm": ["bert.encoder.layer.{n}.output.LayerNorm"],
    "encoder.final_norm": ["bert.encoder.final_norm"],  # of a pre_norm model; a name of ours
    **{  # of an ELMo; names of ours
        f"encoder.{ours}": [f"bert.{theirs}"]
        for ours, theirs in (
            ("embeddings.convolutions.{n}", "embeddings.convolutions.{n}"),
            ("embeddings.highways.{n}", "embeddings.highways.{n}"),
            *(
                (f"layers.{{n}}.{way}.{part}", f"encoder.layer.{{n}}.{way}.{part}")
                for way in ("ahead", "back")
                for part in ("inputs", "state", "project")
            ),
        )
    },
    "pooler.dense": ["bert.pooler.dense"],
    "mlm.dense": ["cls.predictions.transform.dense"],
    "mlm.norm": ["cls.predictions.transform.LayerNorm"],
    "mlm": ["cls.predictions"],  # the bias of the output, whose matrix is the token embedding
    "nsp": ["cls.seq_relationship"],
    "rtd.dense": ["discriminator_predictions.dense"],  # of an ELECTRA
    "rtd.output": ["discriminator_predictions.dense_prediction"],
    **{  # of BiLSTMs between encoder and head; names of ours
        name: [name]
        for way in ("reader.forwards", "reader.backwards", "modeler.forwards", "modeler.backwards")
        for name in (f"{way}.{{n}}.inputs", f"{way}.{{n}}.state")
    },
    **{name: [name] for name in ("mix", "dense", "attention", "nothing", "output")},  # of an ELMo
    "classifier": ["classifier"],
    "span": ["qa_outputs"],
}
HUGGING_FACE |= {  # of two directions, which share the token table; names of ours
    ours.replace("encoder.", f"encoder.{way}.", 1): [
        name.replace("bert.", f"bert.{way}.", 1) for name in theirs
    ]
    for way in ("left", "right")
    for ours, theirs in HUGGING_FACE.items()
    if ours.startswith("encoder.") and ours != "encoder.embeddings.token"
}
OURS = {theirs: ours for ours, row in HUGGING_FACE.items() for theirs in row}

_DISTIL, _BERT = "distilbert.transformer.layer.{n}.", "bert.encoder.layer.{n}."
_GPT = "transformer.h.{n}."
OTHER_NAMES = {  # beginning of an architecture: BERT's: theirs; all else differs by its prefix
    "DistilBert": {
        f"{_BERT}attention.self.query": f"{_DISTIL}attention.q_lin",
        f"{_BERT}attention.self.key": f"{_DISTIL}attention.k_lin",
        f"{_BERT}attention.self.value": f"{_DISTIL}attention.v_lin",
        f"{_BERT}attention.output.dense": f"{_DISTIL}attention.out_lin",
        f"{_BERT}attention.output.LayerNorm": f"{_DISTIL}sa_layer_norm",
        f"{_BERT}intermediate.dense": f"{_DISTIL}ffn.lin1",
        f"{_BERT}output.dense": f"{_DISTIL}ffn.lin2",
        f"{_BERT}output.LayerNorm": f"{_DISTIL}output_layer_norm",
        "bert.pooler.dense": "pre_classifier",
        "cls.predictions.transform.dense": "vocab_transform",
        "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
        "cls.predictions": "vocab_projector",
    },
    "Electra": {
        "bert.embeddings.project": "electra.embeddings_project",
        "cls.predictions.transform.dense": "generator_predictions.dense",
        "cls.predictions.transform.LayerNorm": "generator_predictions.LayerNorm",
        "cls.predictions": "generator_lm_head",
    },
    "ElectraForSequenceClassification": {
        "bert.pooler.dense": "classifier.dense",
        "classifier": "classifier.out_proj",
    },
    "ElectraForMultipleChoice": {"bert.pooler.dense": "sequence_summary.summary"},
    "OpenAIGPT": {
        "bert.embeddings.word_embeddings": "transformer.tokens_embed",
        "bert.embeddings.position_embeddings": "transformer.positions_embed",
        **{  # one matrix
            f"{_BERT}attention.self.{part}": f"{_GPT}attn.c_attn"
            for part in ("query", "key", "value")
        },
        f"{_BERT}attention.output.dense": f"{_GPT}attn.c_proj",
        f"{_BERT}attention.output.LayerNorm": f"{_GPT}ln_1",
        f"{_BERT}intermediate.dense": f"{_GPT}mlp.c_fc",
        f"{_BERT}output.dense": f"{_GPT}mlp.c_proj",
        f"{_BERT}output.LayerNorm": f"{_GPT}ln_2",
        "cls.predictions": "lm_head",
        "classifier": "multiple_choice_head.summary",
    },
}
BERTS = {theirs: name for rows in OTHER_NAMES.values() for name, theirs in rows.items()}
BARE = {  # beginnings of an encoder's names that is stored without a head, and what lacks there
    **dict.fromkeys(("embeddings.", "encoder.", "pooler."), "bert."),
    "transformer.layer.": "distilbert.",
    "embeddings_project.": "electra.",
    **dict.fromkeys(("tokens_embed.", "positions_embed.", "h."), "transformer."),
}

GOOGLE_HEADS = {  # theirs: Google's; the tensors are output_weights and output_bias
    "cls.predictions": "cls/predictions/",
    "cls.seq_relationship": "cls/seq_relationship/",
    "classifier": "",
    "qa_outputs": "cls/squad/",
}
KERNEL = "/kernel"  # a matrix [inputs, outputs] of Google's, the transpose of ours
SLOTS = {"/adam_m": "exp_avg", "/adam_v": "exp_avg_sq"}  # after a weight's name: of the optimizer
GLOBAL_STEP = "global_step"
GPT_MASK = re.compile(r"\bh\.\d+\.attn\.bias$")  # who sees whom, stored beside the weights
CONV1D = re.compile(r"\bh\.\d+\.(attn|mlp)\.c_\w+\.(weight|bias)$")  # a layer's products in a GPT

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of a layer, in the name of a module
TOKEN_EMBEDDING = "bert.embeddings.word_embeddings.weight"
TIED_MATRIX = "cls.predictions.decoder.weight"  # some folders store the token embedding twice
# no weights of their own
REDUNDANT = {TIED_MATRIX, "cls.predictions.decoder.bias", "bert.embeddings.position_ids"}


def hugging_face_names(name: str) -> list[str]:
    """The stored tensors that make up ours.

    >>> [name.rpartition("self.")[2] for name in hugging_face_names("encoder.layers.0.qkv.weight")]
    ['query.weight', 'key.weight', 'value.weight']
    """
    template, number, kind = name_parts(name)
    return [f"{theirs.replace('{n}', number)}.{kind}" for theirs in HUGGING_FACE[template]]


def canonical(name: str) -> str:
    """A stored name as transformers spells it today in a model with a head.

    A bare encoder is stored without "bert."; files converted from TensorFlow have gamma and beta,
    and Google's checkpoints the names of `google_name`. The names of DistilBERT, ELECTRA and GPT
    become those of the same modules of BERT.

    >>> canonical("embeddings.LayerNorm.gamma"), canonical("bert/encoder/layer_3/output/dense/bias")
    ('bert.embeddings.LayerNorm.weight', 'bert.encoder.layer.3.output.dense.bias')
    >>> canonical("distilbert.transformer.layer.3.attention.q_lin.bias")
    'bert.encoder.layer.3.attention.self.query.bias'
    """
    if (template := GOOGLE_LAYER.sub(r"layer_{n}/", name)) in FROM_GOOGLE:
        number = GOOGLE_LAYER.search(name)
        return FROM_GOOGLE[template].replace("{n}", number[1] if number else "")
    name = next((lacks for start, lacks in BARE.items() if name.startswith(start)), "") + name
    name = re.sub(r"^(distilbert|electra)\.", "bert.", _renamed(name, BERTS))
    name = re.sub(r"^cls\.predictions\.weight$", TIED_MATRIX, name)
    name = re.sub(r"\.LayerNorm\.gamma$", ".LayerNorm.weight", name)
    return re.sub(r"\.LayerNorm\.beta$", ".LayerNorm.bias", name)


def spelled(name: str, architecture: str) -> str:
    """A canonical name as the class `architecture` of transformers has it.

    >>> spelled("bert.pooler.dense.bias", "ElectraForSequenceClassification")
    'classifier.dense.bias'
    """
    for beginning, rows in OTHER_NAMES.items():
        if architecture.startswith(beginning):
            name = _renamed(name, rows)
    family = re.match("Distil|Electra", architecture)
    prefix = {"Distil": "distilbert.", "Electra": "electra."}[family[0]] if family else "bert."
    return re.sub(r"^bert\.", prefix, name)


def _renamed(name: str, rows: Mapping[str, str]) -> str:
    module, number, kind = name_parts(name)
    return f"{rows[module].replace('{n}', number)}.{kind}" if module in rows else name


def conv1d_parts(name: str, shape: tuple[int, ...]) -> list[tuple[str, slice]] | None:
    """The canonical names in a layer's product of GPT's, and the columns of each; None: no such.

    Its matrices are [inputs, outputs], and that of queries, keys and values is one.

    >>> conv1d_parts("h.3.attn.c_attn.weight", (8, 24))[1]
    ('bert.encoder.layer.3.attention.self.key.weight', slice(8, 16, None))
    """
    if not CONV1D.search(name):
        return None
    names = [own := canonical(name)]
    if ".self." in own:
        names = [re.sub(r"(?<=self\.)\w+", part, own) for part in ("query", "key", "value")]
    width, over = divmod(sum(shape[-1:]), len(names))
    if over:
        return None
    return [(part, slice(k * width, (k + 1) * width)) for k, part in enumerate(names)]


def google_name(name: str) -> str:
    """A canonical name as google-research/bert spells it.

    >>> google_name("bert.encoder.layer.3.output.dense.weight")
    'bert/encoder/layer_3/output/dense/kernel'
    >>> google_name("bert.embeddings.word_embeddings.weight"), google_name("classifier.bias")
    ('bert/embeddings/word_embeddings', 'output_bias')
    """
    module, _, kind = name.rpartition(".")
    if module in GOOGLE_HEADS:
        return GOOGLE_HEADS[module] + {"weight": "output_weights", "bias": "output_bias"}[kind]
    path = module.replace(".layer.", ".layer_").replace(".", "/")
    if module.endswith("_embeddings"):
        return path
    own = {"weight": "gamma", "bias": "beta"} if module.endswith("LayerNorm") else {}
    return f"{path}/{own.get(kind) or {'weight': 'kernel', 'bias': 'bias'}[kind]}"


GOOGLE_LAYER = re.compile(r"layer_(\d{1,6})/")
FROM_GOOGLE = {  # with {n} for the number of a layer
    google_name(name): name
    for module in OURS
    if module.split(".")[0] in ("bert", "cls", "classifier", "qa_outputs")
    for name in (f"{module}.bias", f"{module}.weight")  # tables have no bias: weight is the last
}


def name_parts(name: str) -> tuple[str, str, str]:
    """ "encoder.layers.3.qkv.bias" -> ("encoder.layers.{n}.qkv", "3", "bias")."""
    module, _, kind = name.rpartition(".")
    number = NUMBER.search(module)
    return NUMBER.sub("{n}", module), number[0] if number else "", kind
