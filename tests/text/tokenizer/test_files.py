import json
import shutil

import pytest

from bertsmith.text.tokenizer.normalize import Normalization
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

SMALL = Vocabulary([*SPECIAL, "the", "##m", "é", "中", "e"])
SETTINGS = [
    Normalization(),
    Normalization(False, "none"),
    Normalization(True, "none", split_cjk=False),
    Normalization(False, "all"),
    Normalization(True, "latin"),
    Normalization(True, "none", "nfc"),
    Normalization(False, "latin", "nfkc", False),
]


def write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("lost", ["vocab.txt", "tokenizer.json", "tokenizer_config.json"])
def test_any_two_of_the_three_files_are_enough(tmp_path, settings, lost):
    saved = Tokenizer(SMALL, settings)
    saved.save(tmp_path)
    (tmp_path / lost).unlink()
    again = Tokenizer.from_pretrained(tmp_path)
    assert again.fingerprint == saved.fingerprint
    assert again.vocabulary.pieces == SMALL.pieces and again.normalization == settings


def test_a_bare_vocabulary_is_cased_when_it_has_capitals(tmp_path):
    SMALL.write(tmp_path / "vocab.txt")
    assert Tokenizer.from_pretrained(tmp_path).normalization.lowercase
    Vocabulary([*SMALL.pieces, "Paris"]).write(tmp_path / "vocab.txt")
    assert not Tokenizer.from_pretrained(tmp_path).normalization.lowercase
    assert Tokenizer.from_vocab(tmp_path / "vocab.txt").normalization.lowercase


def test_the_configuration_outranks_the_normalizer(tmp_path):
    Tokenizer(SMALL).save(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"do_lower_case": False})
    assert not Tokenizer.from_pretrained(tmp_path).normalization.lowercase


def test_a_published_folder(published_folder, tmp_path):
    tokenizer = Tokenizer.from_pretrained(published_folder)
    assert len(tokenizer.vocabulary) == 30_522 and tokenizer.normalization.lowercase
    ids = tokenizer.encode_batch(["Paris in the café"]).ids.tolist()
    assert ids == [3000, 1999, 1996, 7668]
    shutil.copy(published_folder / "tokenizer.json", tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("settings", SETTINGS)
def test_transformers_opens_what_is_saved(tmp_path, settings):
    transformers = pytest.importorskip("transformers")
    Tokenizer(SMALL, settings).save(tmp_path)
    text, pair = "Them 中é them", "the É"
    ours = Tokenizer(SMALL, settings).encode_batch([text, pair])
    cls, sep = SMALL.cls_id, SMALL.sep_id
    kinds = [transformers.AutoTokenizer]
    if settings.strip_accents != "latin" and settings.unicode == "none":
        kinds.append(transformers.BertTokenizerFast)
    for kind in kinds:
        theirs = kind.from_pretrained(tmp_path)
        encoded = theirs(text, pair)
        assert encoded.input_ids == [cls, *ours[0].ids, sep, *ours[1].ids, sep]
        assert encoded.token_type_ids == [0] * (len(ours[0].ids) + 2) + [1] * (len(ours[1].ids) + 1)
        assert theirs.mask_token_id == SMALL.mask_id and theirs.model_max_length == 512
        assert theirs("the [MASK]").input_ids[2] == SMALL.mask_id


def test_an_absent_tokenizer_is_said(tmp_path):
    with pytest.raises(ValueError, match="neither vocab.txt nor tokenizer.json"):
        Tokenizer.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("model", {"type": "BPE"}, "type of the model is 'BPE', not 'WordPiece'"),
        ("model", {"continuing_subword_prefix": "@@"}, "continuing_subword_prefix"),
        ("normalizer", {"type": "NFKC"}, "type of the normalizer is 'NFKC'"),
        ("pre_tokenizer", {"type": "Whitespace"}, "type of the pre_tokenizer"),
        ("normalizer", {"clean_text": False}, "clean_text"),
        ("normalizer", {"lowercase": "no"}, "do_lower_case is 'no'"),
        ("model", {"vocab": {"[PAD]": 0, "a": 7}}, "no piece has the id 5"),
        ("model", {"vocab": {"[PAD]": "x"}}, "no vocabulary in it"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(tmp_path, section, change, message):
    Tokenizer(SMALL).save(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    value = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    value[section] |= change
    write_json(tmp_path / "tokenizer.json", value)
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_damaged_and_foreign_configurations_are_named(tmp_path):
    SMALL.write(tmp_path / "vocab.txt")
    for content, message in [
        ("[1]", "tokenizer_config.json: not a JSON object"),
        ("{", "tokenizer_config.json:1: not valid JSON"),
        ('{"word_tokenizer_type": "mecab"}', "word_tokenizer_type is 'mecab'"),
        ('{"do_lower_case": "yes"}', "do_lower_case is 'yes'"),
    ]:
        (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            Tokenizer.from_pretrained(tmp_path)


def test_a_google_folder_with_tags_for_vocabulary_is_uncased(tmp_path):
    # The Chinese model's vocab.txt has "<S>" and "<T>", and nothing else in capitals.
    Vocabulary([*SMALL.pieces, "<S>", "<T>"]).write(tmp_path / "vocab.txt")
    assert Tokenizer.from_pretrained(tmp_path).normalization.lowercase


@pytest.mark.parametrize(
    "extra",
    [
        [{"type": "Replace", "pattern": {"String": "\u2019"}, "content": "'"}],
        [{"type": "StripAccents"}],
        None,
        [3],
    ],
)
def test_a_sequence_of_normalizers_of_another_kind_is_refused(tmp_path, extra):
    Tokenizer(SMALL).save(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    parts = None if extra is None else [tokenizer["normalizer"], *extra]
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": parts}
    write_json(tmp_path / "tokenizer.json", tokenizer)
    with pytest.raises(ValueError, match="(a sequence of|type of the) normali"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"do_basic_tokenize": False}, "do_basic_tokenize is False"),
        ({"do_lower_case": 1}, "do_lower_case is 1: it must be true or false"),
        ({"bertsmith_normalization": {"unicode": "nfd"}}, "unicode is 'nfd'"),
        ({"bertsmith_normalization": {"lowercase": 1}}, "lowercase is 1"),
        ({"bertsmith_normalization": {"case": True}}, "bertsmith_normalization: .*case"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(tmp_path, setting, message):
    Tokenizer(SMALL).save(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", setting)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_pretrained(tmp_path)
