"""Released ELMo weights: the vectors that TensorFlow gave, and files that are not theirs."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.formats.elmo import elmo_settings
from bertsmith.checkpoints.model_folder import load_model
from bertsmith.checkpoints.reading import load_tokenizer
from bertsmith.checkpoints.stored import weight_files
from bertsmith.model.elmo_heads import gather_words
from bertsmith.model.heads import BareModel, SequenceClassifier
from bertsmith.text.tokenizer.characters import CharacterTokenizer
from bertsmith.text.tokenizer.rows import make_rows

h5py = pytest.importorskip("h5py")
FIXTURE = Path(__file__).parents[4] / "shared/data/elmo-fixture"
needs_fixture = pytest.mark.skipif(not FIXTURE.is_dir(), reason="the fixture is not here")


@needs_fixture
@pytest.mark.parametrize("source", ["bilm-tf", "allennlp"])  # without and with skip connections
def test_vectors_are_those_of_the_released_code(source):
    folder, tokenizer = FIXTURE / source, CharacterTokenizer()
    loaded = load_model(folder, SequenceClassifier, num_outputs=2)
    assert not loaded.unused and not any(name.startswith("encoder") for name in loaded.missing)
    elmo = loaded.model.eval().encoder
    elmo.stateful = True
    streams = json.loads((folder / "lm_embeddings_sentences.json").read_text())
    files = [h5py.File(folder / f"lm_embeddings_{k}.hdf5") for k in range(3)]
    for number in range(10):  # a batch of three rows, each of which goes on with its stream
        sentences = [stream[number].split() for stream in streams]
        rows = [
            make_rows(whole(tokenizer, words), None, tokenizer.vocabulary) for words in sentences
        ]
        ids = torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(row.ids) for row in rows], batch_first=True
        )
        words = gather_words(ids)
        numbers, lengths = words.texts[0]
        with torch.no_grad():
            top = elmo(words.words_UK, numbers, lengths + 2)[-1]
        for k, file in enumerate(files):
            wanted = np.concatenate(list(file[str(number)]), axis=1)  # [2, W, P]
            found = top[k, 1 : len(sentences[k]) + 1].numpy()
            # float32 over up to 300 steps in one state; 1.2e-6 was seen
            np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


def whole(tokenizer, words):
    """Words of one text, each as it is given."""
    pieces = tokenizer.encode_words(words)
    boundaries = np.array([0, len(pieces.ids)])
    return type(pieces)(pieces.ids, pieces.offsets, pieces.word_ids, boundaries)


OPTIONS = {
    "lstm": {
        "cell_clip": 3, "use_skip_connections": True, "n_layers": 1, "proj_clip": 3,
        "projection_dim": 4, "dim": 5,
    },
    "char_cnn": {
        "embedding": {"dim": 3}, "filters": [[1, 2], [2, 4]], "n_highway": 1,
        "n_characters": 262, "max_characters_per_token": 50, "activation": "relu",
    },
}  # fmt: skip


@pytest.fixture
def released(tmp_path):
    """A folder of the released layout, whose files have names as they are offered for download."""
    (tmp_path / "tiny_options.json").write_text(json.dumps(OPTIONS))
    draw = np.random.default_rng(1)
    cell = "RNN/MultiRNNCell/Cell0/LSTMCell"
    shapes = {
        "char_embed": (261, 3),
        "CNN/W_cnn_0": (1, 1, 3, 2),
        "CNN/b_cnn_0": (2,),
        "CNN/W_cnn_1": (1, 2, 3, 4),
        "CNN/b_cnn_1": (4,),
        **{f"CNN_high_0/W_{part}": (6, 6) for part in ("carry", "transform")},
        **{f"CNN_high_0/b_{part}": (6,) for part in ("carry", "transform")},
        "CNN_proj/W_proj": (6, 4),
        "CNN_proj/b_proj": (4,),
        **{f"RNN_{way}/{cell}/W_0": (8, 20) for way in (0, 1)},
        **{f"RNN_{way}/{cell}/B": (20,) for way in (0, 1)},
        **{f"RNN_{way}/{cell}/W_P_0": (5, 4) for way in (0, 1)},
    }
    with h5py.File(tmp_path / "tiny_weights.hdf5", "w") as file:
        for name, shape in shapes.items():
            file[name] = draw.standard_normal(shape).astype(np.float32)
    return tmp_path


def test_a_released_folder_is_a_model(released):
    config = read_config(released)
    assert (config.family, config.hidden_size, config.filters) == ("elmo", 8, (2, 4))
    assert isinstance(load_tokenizer(released), CharacterTokenizer)
    assert [path.name for path in weight_files(released)] == ["tiny_weights.hdf5"]
    loaded = load_model(released, SequenceClassifier, num_outputs=3)
    assert not loaded.unused and "classifier.weight" in loaded.missing


def as_classifier(folder):
    load_model(folder, SequenceClassifier, num_outputs=3)


def without_projection(weights):
    with h5py.File(weights, "a") as file:
        del file["CNN_proj/W_proj"]


def with_other_options(weights):
    other = OPTIONS | {"lstm": OPTIONS["lstm"] | {"dim": 6}}
    weights.with_name("tiny_options.json").write_text(json.dumps(other))


@pytest.mark.parametrize(
    ("change", "read", "fault"),
    [
        (without_projection, as_classifier, "tiny_weights.hdf5: no dataset 'CNN_proj/W_proj': not"),
        (with_other_options, as_classifier, r"has shape \[20, 4\], but by tiny_options.json"),
        (lambda weights: weights.write_bytes(b"x" * 100), as_classifier,
         "tiny_weights.hdf5: no HDF5 file, or damaged"),
        (lambda weights: weights.rename(weights.with_name("weights.th")), weight_files,
         "weights.th: pickled weights, which can run programs"),
        (lambda weights: shutil.copy(weights, weights.with_name("more_weights.hdf5")), weight_files,
         r"several files \*weights.hdf5"),
        (lambda weights: None, lambda folder: load_model(folder, BareModel),
         "an ELMo, which only feeds the heads of tasks"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named(released, change, read, fault):
    change(released / "tiny_weights.hdf5")
    with pytest.raises(ValueError, match=fault):
        read(released)


@pytest.mark.parametrize(
    ("part", "name", "value", "fault"),
    [
        ("char_cnn", "activation", "tanh", "has only relu"),
        ("char_cnn", "filters", [[2, 3]], "has only relu, filters of the widths 1, 2, 3"),
        ("char_cnn", "n_characters", 300, "262 characters"),
        ("lstm", "dim", None, "no options of an ELMo"),
    ],
)
def test_options_that_cannot_be_computed(tmp_path, part, name, value, fault):
    path = tmp_path / "options.json"
    path.write_text(json.dumps(OPTIONS | {part: OPTIONS[part] | {name: value}}))
    with pytest.raises(ValueError, match=fault):
        elmo_settings(path)
