"""Model folders: transformers' and ours there and back, and every way a folder can be wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith.checkpoints.config_json import label_names, read_config, read_extra_config
from bertsmith.checkpoints.model_folder import load_model, model_class, save_model
from bertsmith.checkpoints.reading import load_tokenizer, open_tensors
from bertsmith.checkpoints.tensors import from_hugging_face, to_hugging_face
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import BareModel, PreTrainingModel, SequenceClassifier, TokenClassifier

from ..tiny import piece_tokenizer, random_model, write

WEIGHTS = "model.safetensors"
READERS = (  # with torch, and without
    lambda folder: load_model(folder, PreTrainingModel),
    lambda folder: dict(open_tensors(folder, "PreTrainingModel")),
)


@pytest.fixture(scope="module")
def transformers():
    library = pytest.importorskip("transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def change_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    save_file(change(tensors), folder / WEIGHTS, metadata={"format": "pt"})


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


@pytest.mark.parametrize(
    "name",
    ["BertForPreTraining", "BertForMaskedLM", "BertModel", "BertForSequenceClassification"],
)
def test_a_transformers_folder_comes_back_bit_for_bit(name, transformers, tokenizer, tmp_path):
    kind = getattr(transformers, name)
    shape = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "type_vocab_size": 3}
    shape |= {"num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 40}
    rest = {"hidden_act": "gelu_new", "hidden_dropout_prob": 0.25, "layer_norm_eps": 1e-6}
    rest |= {"attention_probs_dropout_prob": 0.0, "initializer_range": 0.5}
    names = {0: "no", 1: "maybe", 2: "yes"}
    labels = {"id2label": names, "label2id": {name: k for k, name in names.items()}}
    config = transformers.BertConfig(**shape, **rest, **labels)
    before = kind(config).eval()
    before.save_pretrained(tmp_path / "theirs")

    loaded = load_model(tmp_path / "theirs", model_class(tmp_path / "theirs"))
    classifies = isinstance(loaded.model, SequenceClassifier)
    names = label_names(tmp_path / "theirs") if classifies else None
    written = {"label_names": names, "exclude": loaded.missing}
    save_model(loaded.model, tokenizer, tmp_path / "ours", **written)
    after, information = kind.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(information.values()), information
    assert_equal(after.state_dict(), before.state_dict())
    kept = after.config.to_dict()
    for setting, value in before.config.to_dict().items():
        ours_has_none = setting in ("id2label", "label2id") and "Classification" not in name
        if setting not in ("transformers_version", "_name_or_path") and not ours_has_none:
            assert kept[setting] == value, setting


def test_auto_classes_of_transformers_open_our_folders(transformers, folder, classifier_folder):
    automatic = transformers.AutoModel.from_pretrained(folder)
    assert type(automatic).__name__ == "BertModel"
    assert automatic.config.architectures == ["BertForPreTraining"]
    words = transformers.AutoTokenizer.from_pretrained(folder)("The cats sat.")["input_ids"]
    assert words == [2, 5, 6, 8, 7, 11, 3]
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(classifier_folder)
    assert classifier.config.id2label == {0: "no", 1: "maybe", 2: "yes"}


def test_our_folder_holds_each_tensor_once_under_their_names(folder, pretrained):
    stored = load_file(folder / WEIGHTS)
    assert "cls.predictions.decoder.weight" not in stored
    assert_equal(dict(from_hugging_face(stored)), dict(pretrained.state_dict()))
    assert_equal(to_hugging_face(pretrained.state_dict()), stored)
    assert (folder / WEIGHTS).stat().st_mode & 0o777 == folder.stat().st_mode & 0o666


def test_our_own_settings_travel_along(pretrained, tokenizer, tmp_path):
    save_model(pretrained, tokenizer, tmp_path, extra_config={"max_length": 64})
    assert read_extra_config(tmp_path)["max_length"] == 64
    assert read_config(tmp_path) == pretrained.config
    assert label_names(tmp_path) == []


def test_changes_replace_values_of_the_configuration(folder):
    model = load_model(folder, PreTrainingModel, dropout=0.0, attention_dropout=0.3).model
    assert (model.config.dropout, model.config.attention_dropout) == (0.0, 0.3)
    assert model.encoder.layers[0].dropout.rate == 0.0


def old_names(tensors):
    """As the conversion scripts of 2018 left them: gamma and beta, no prefix, buffers."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma")
        renamed[name.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    renamed["embeddings.position_ids"] = torch.arange(24)[None]
    table = tensors["bert.embeddings.word_embeddings.weight"]
    return renamed | {"cls.predictions.decoder.weight": table.clone()}


def test_old_names_are_understood(folder, pretrained):
    change_weights(folder, old_names)
    loaded = load_model(folder, PreTrainingModel)
    assert loaded.missing == loaded.unused == []
    assert_equal(loaded.model.state_dict(), pretrained.state_dict())


def test_shards_and_half_precision_are_understood(folder, pretrained):
    tensors = {name: value.bfloat16() for name, value in load_file(folder / WEIGHTS).items()}
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for number, names in enumerate([sorted(tensors)[::2], sorted(tensors)[1::2]], start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    loaded = load_model(folder, PreTrainingModel)
    expected = {n: v.bfloat16().float() for n, v in pretrained.state_dict().items()}
    assert_equal(loaded.model.state_dict(), expected)

    for file, message in (
        ("../secret.safetensors", "'../secret.safetensors' is not the name of a file"),
        ("gone.safetensors", "gone.safetensors: missing"),
    ):
        index.write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(ValueError, match=message):
            load_model(folder, PreTrainingModel)


def test_a_fresh_head_is_initialised_by_the_generator_and_listed(folder, pretrained):
    def load(seed):
        generator = torch.Generator().manual_seed(seed)
        return load_model(folder, SequenceClassifier, num_outputs=4, generator=generator)

    loaded = load(5)
    assert loaded.missing == ["classifier.weight", "classifier.bias"]
    assert "cls.seq_relationship.weight" in loaded.unused and len(loaded.unused) == 7
    weight = loaded.model.classifier.weight
    assert weight.shape == (4, 16) and 0 < weight.abs().max() <= 0.04
    assert torch.equal(weight, load(5).model.classifier.weight)
    assert not torch.equal(weight, load(6).model.classifier.weight)
    assert torch.equal(loaded.model.pooler.dense.weight, pretrained.pooler.dense.weight)
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())


def test_a_classifier_of_another_number_of_classes_starts_afresh(classifier_folder):
    kept = load_model(classifier_folder, SequenceClassifier)
    assert kept.missing == [] and kept.model.classifier.out_features == 3
    fresh = load_model(classifier_folder, SequenceClassifier, num_outputs=5)
    assert fresh.missing == ["classifier.weight", "classifier.bias"]
    assert sorted(fresh.unused) == ["classifier.bias", "classifier.weight"]
    assert label_names(classifier_folder) == ["no", "maybe", "yes"]


def test_a_head_of_another_task_is_no_classifier(classifier_folder, change_config):
    change_config(classifier_folder, {"architectures": ["BertForTokenClassification"]})
    assert model_class(classifier_folder) is TokenClassifier
    message = "not a fine-tuned classifier but a TokenClassifier: fine-tune a model first"
    with pytest.raises(ValueError, match=message):
        load_model(classifier_folder, SequenceClassifier)
    fresh = load_model(classifier_folder, SequenceClassifier, num_outputs=3)
    assert fresh.missing == ["classifier.weight", "classifier.bias"]


@pytest.mark.parametrize("stored", [None, [], "BertForMaskedLM"])
def test_a_class_that_is_not_named_is_told_by_the_tensors(stored, folder, change_config):
    """One name is read as a list of it."""
    change_config(folder, {"architectures": stored})
    assert model_class(folder) is PreTrainingModel
    change_weights(folder, lambda tensors: {n: t for n, t in tensors.items() if n[:4] != "cls."})
    bare = PreTrainingModel if stored else BareModel
    assert model_class(folder) is bare
    (folder / WEIGHTS).unlink()  # as beside an exported model
    assert model_class(folder) is bare


@pytest.mark.parametrize("stored", [[5], {"BertModel": 1}, 7])
def test_what_is_no_name_of_a_class_is_refused(stored, folder, change_config):
    change_config(folder, {"architectures": stored})
    with pytest.raises(ValueError, match="config.json: architectures is .*: it must be a list"):
        model_class(folder)


def test_loaded_tensors_do_not_hang_on_the_file(folder):
    """A map of the file starts at any byte; memory of torch's own is aligned to 64."""
    model = load_model(folder, PreTrainingModel).model
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())


def test_a_folder_without_weights_is_named(folder):
    (folder / WEIGHTS).unlink()
    message = "no model.safetensors or pytorch_model.bin, so not a folder with a model"
    with pytest.raises(ValueError, match=message):
        load_model(folder, PreTrainingModel)


def header(entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def of_floats(begin, end, shape=(4,)):
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        header({"a": of_floats(0, 16), "b": of_floats(8, 24)}) + bytes(24),  # they overlap
        header({"a": of_floats(0, 16), "b": of_floats(0, 16)}) + bytes(16),
        header({"a": of_floats(0, 16)}) + bytes(8),  # beyond the end
        header({"a": of_floats(0, 16), "b": of_floats(32, 48)}) + bytes(48),  # a hole
        header({"a": of_floats(16, 0)}) + bytes(16),
        header({"a": of_floats(0, 16, [2**40])}) + bytes(16),
        header({"a": of_floats(0, 16, [2**62, 4])}) + bytes(16),  # its product is 0 in 64 bits
        header({"a": of_floats(0, 16) | {"dtype": "F31"}}) + bytes(16),
        header({"a": of_floats(-16, 0)}) + bytes(16),
        (2**60).to_bytes(8, "little") + b"{}",  # a header longer than the file
        *(slice(end) for end in (0, 5, 300, -1)),  # what is left of the file
    ],
)
def test_weights_that_cannot_be_are_named(content, folder):
    if isinstance(content, slice):
        content = (folder / WEIGHTS).read_bytes()[content]
    (folder / WEIGHTS).write_bytes(content)
    for read in READERS:
        with pytest.raises(ValueError, match="model.safetensors: truncated or damaged"):
            read(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "roberta"},
            "config.json: model_type 'roberta': bertsmith opens only bert, electra, dist",
        ),
        ({"model_type": ["bert"]}, "config.json: model_type .* bertsmith opens only"),
        ({"position_embedding_type": "relative_key"}, "'relative_key': bertsmith has only"),
        ({"hidden_act": "relu"}, "config.json: hidden_act 'relu': bertsmith has only gelu"),
        ({"num_hidden_layers": 0}, "`num_layers=0`: must be 1 to 10,000,000"),
        ({"vocab_size": 10**12}, "`vocab_size=1000000000000`: must be 1 to"),
        ({"hidden_size": "16"}, "config.json: hidden_size = '16': expected a whole number"),
        ({"num_attention_heads": 3}, "hidden_size 16 is not a multiple of num_heads 3"),
        ({"hidden_dropout_prob": "much"}, "config.json: dropout = 'much': expected a number"),
        ({"num_hidden_layers": 9_999_999}, "config.json says 9999999 layers, but the weights"),
        ({"num_hidden_layers": 1}, "config.json says 1 layers, but the weights hold 2"),
        ({"vocab_size": 9_999_999}, r"word_embeddings.weight' has shape \[12, 16\], but"),
        ({"intermediate_size": 9_999_999}, r"should have \[9999999, 16\]"),
        ({"layer_norm_eps": -1}, "config.json: `layer_norm_eps=-1.0`: must be above 0"),
        ({"pad_token_id": 12}, "config.json: pad_id 12 is none of 12 pieces"),
        ({"id2label": {"1": "a", "2": "b"}}, "id2label does not number the labels from 0"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(folder, values, message, change_config):
    change_config(folder, values)
    for read in READERS:
        with pytest.raises(ValueError, match=message) as caught:
            read(folder)
            label_names(folder)
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("vocab_s", "s"), "config.json: missing setting vocab_size"),
        (lambda text: "[]", "config.json: not a JSON object"),
        (lambda text: '{\n"vocab_size":', "config.json:2: not valid JSON"),
        (None, "no config.json, so not a folder with a model"),
    ],
)
def test_a_missing_or_damaged_configuration_is_named(change, message, folder):
    file = folder / "config.json"
    text = file.read_text()
    file.unlink()
    if change:
        write(file, change(text))
    with pytest.raises(ValueError, match=message):
        read_config(folder)


def test_an_encoder_must_be_whole(folder):
    lost = "bert.encoder.layer.1.attention.self.key.bias"
    change_weights(folder, lambda tensors: {n: t for n, t in tensors.items() if n != lost})
    with pytest.raises(ValueError, match=f"lack '{lost}'"):
        load_model(folder, PreTrainingModel)


def test_an_output_matrix_of_its_own_is_refused(folder):
    own = {"cls.predictions.decoder.weight": torch.ones(12, 16)}
    change_weights(folder, lambda tensors: tensors | own)
    message = "differs from the token embedding, to which bertsmith ties it"
    with pytest.raises(ValueError, match=message):
        load_model(folder, PreTrainingModel)
    assert load_model(folder, BareModel).missing == []  # the encoder alone is well defined


@pytest.mark.parametrize("kind", [torch.int8, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("file", [WEIGHTS, "pytorch_model.bin"])
def test_the_codes_of_a_quantized_model_are_no_weights(kind, file, folder):
    """Copied into a float32 weight they would pass for it, a hundred times too large."""
    name = "bert.encoder.layer.1.attention.self.query.weight"
    tensors = load_file(folder / WEIGHTS)
    tensors[name] = (100 * tensors[name]).to(kind)
    (folder / WEIGHTS).unlink()
    (save_file if file == WEIGHTS else torch.save)(tensors, folder / file)
    for read in READERS:
        with pytest.raises(ValueError, match=f"'{name}' holds .* numbers, not weights: take"):
            read(folder)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "where", ["bert.encoder.layer.1.attention.self.key.bias", "cls.predictions.bias"]
)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_number_that_is_none_is_named(value, where, kind, folder):
    def damage(tensors):
        tensors = {name: tensor.to(kind) for name, tensor in tensors.items()}
        tensors[where][3] = value
        return tensors

    change_weights(folder, damage)
    with pytest.raises(ValueError, match=f"'{where}' holds NaN or infinity: take an ear") as caught:
        load_model(folder, PreTrainingModel)
    assert str(folder / WEIGHTS) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_not_used_is_not_examined(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors["cls.predictions.bias"][:] = torch.inf
    save_file(tensors | {"foreign.weight": torch.full((2,), torch.nan)}, folder / WEIGHTS)
    assert load_model(folder, BareModel).missing == []


def test_a_tokenizer_larger_than_the_model_is_refused(pretrained, tmp_path):
    large = piece_tokenizer(" ".join(map(str, range(100))))
    with pytest.raises(ValueError, match="a tokenizer of 105 pieces for a model of 12"):
        save_model(pretrained, large, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_far_shorter_than_the_model_is_told(tmp_path, capsys):
    tokenizer = piece_tokenizer("cat")
    for rows, said in ((len(tokenizer.vocabulary) + 127, ""), (134, "6 pieces, but its model 134")):
        config = ModelConfig(rows, 16, 1, 2, 32, max_positions=8)
        load_tokenizer(random_model(tmp_path / str(rows), tokenizer, config=config))
        err = capsys.readouterr().err
        assert said in err and bool(said) == ("is it another model's?" in err)
