import json
import shutil

import pytest

from bertsmith.text.tokenizer.normalize import Normalization
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import Vocabulary

from ...tiny import write
from ..letters import vocabulary_of

SMALL = vocabulary_of("the", "##m", "é", "中", "e")
SETTINGS = [
    Normalization(),
    Normalization(False, "none"),
    Normalization(True, "none", split_cjk=False),
    Normalization(False, "all"),
    Normalization(True, "latin"),
    Normalization(True, "none", "nfc"),
    Normalization(False, "latin", "nfkc", False),
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("lost", ["vocab.txt", "tokenizer.json", "tokenizer_config.json"])
def test_any_two_of_the_three_files_are_enough(tmp_path, settings, lost):
    saved = Tokenizer(SMALL, settings)
    saved.save(tmp_path)
    (tmp_path / lost).unlink()
    again = Tokenizer.from_pretrained(tmp_path)
    assert again.fingerprint == saved.fingerprint
    assert again.vocabulary.pieces == SMALL.pieces and again.normalization == settings


def lowercase_of(folder):
    return Tokenizer.from_pretrained(folder).normalization.lowercase


# The Chinese model's vocab.txt has "<S>" and "<T>", and nothing else in capitals.
@pytest.mark.parametrize(
    ("more", "lowercase"), [([], True), (["<S>", "<T>"], True), (["Paris"], False)]
)
def test_a_bare_vocabulary_is_cased_when_it_has_capitals(tmp_path, more, lowercase):
    Vocabulary([*SMALL.pieces, *more]).write(tmp_path / "vocab.txt")
    assert lowercase_of(tmp_path) == lowercase
    assert Tokenizer.from_vocab(tmp_path / "vocab.txt").normalization.lowercase


def test_the_configuration_outranks_the_normalizer(tmp_path):
    Tokenizer(SMALL).save(tmp_path)
    write(tmp_path / "tokenizer_config.json", '{"do_lower_case": false}')
    assert not lowercase_of(tmp_path)


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


NORMALIZER = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
NORMALIZER |= {"strip_accents": None, "lowercase": True}  # as in what is saved
QUOTES = {"type": "Replace", "pattern": {"String": "\u2019"}, "content": "'"}
SEQUENCE = "(a sequence of|type of the) normali"


def sequence(*more):
    return {"type": "Sequence", "normalizers": [NORMALIZER, *more]}


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
        ("normalizer", sequence(QUOTES), SEQUENCE),
        ("normalizer", sequence({"type": "StripAccents"}), SEQUENCE),
        ("normalizer", sequence(3), SEQUENCE),
        ("normalizer", {"type": "Sequence", "normalizers": None}, SEQUENCE),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(tmp_path, section, change, message):
    Tokenizer(SMALL).save(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    value = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    value[section] = change if "normalizers" in change else value[section] | change
    write(tmp_path / "tokenizer.json", json.dumps(value))
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_list_of_added_tokens_is_refused(tmp_path):
    Tokenizer(SMALL).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    write(path, json.dumps(value | {"added_tokens": True}))
    with pytest.raises(ValueError, match=f"{path}: added_tokens is True: it must be a list"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[1]", "tokenizer_config.json: not a JSON object"),
        ("{", "tokenizer_config.json:1: not valid JSON"),
        ('{"word_tokenizer_type": "mecab"}', "word_tokenizer_type is 'mecab'"),
        ('{"do_lower_case": "yes"}', "do_lower_case is 'yes'"),
        ('{"do_lower_case": 1}', "do_lower_case is 1: it must be true or false"),
        ('{"do_basic_tokenize": false}', "do_basic_tokenize is False"),
        ('{"bertsmith_normalization": {"unicode": "nfd"}}', "unicode is 'nfd'"),
        ('{"bertsmith_normalization": {"lowercase": 1}}', "lowercase is 1"),
        ('{"bertsmith_normalization": null}', "bertsmith_normalization is None: it must be an obj"),
        (
            '{"bertsmith_normalization": "x"}',
            "bertsmith_normalization is 'x': it must be an object",
        ),
        ('{"bertsmith_normalization": {"case": true}}', "bertsmith_normalization: .*case"),
    ],
)
@pytest.mark.parametrize("whole", [False, True], ids=["with vocab.txt alone", "with both"])
def test_a_configuration_that_cannot_be_followed_is_refused(tmp_path, whole, config, message):
    Tokenizer(SMALL).save(tmp_path)
    if not whole:
        (tmp_path / "tokenizer.json").unlink()
    write(tmp_path / "tokenizer_config.json", config)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_pretrained(tmp_path)


def test_an_absent_tokenizer_is_said(tmp_path):
    message = r"neither vocab.txt nor tokenizer.json is there: .*`bertsmith vocab` wrote"
    with pytest.raises(ValueError, match=f"{message}$"):
        Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{message}; .* hub is `bertsmith.load\(name\).token"):
        Tokenizer.from_pretrained(tmp_path / "nowhere")
