"""A tokenizer's files in a model folder, as Hugging Face's libraries write and read them."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bertsmith.base.files import read_optional_json, write_json
from bertsmith.text.tokenizer.normalize import CHOICES, Normalization, split_words
from bertsmith.text.tokenizer.wordpiece import MAX_WORD, SPECIAL, Vocabulary

VOCABULARY_FILE = "vocab.txt"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (VOCABULARY_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG)
ADDED_FILE = "added_tokens.json"
BESIDE = (TOKENIZER_CONFIG, TOKENIZER_FILE, "config.json", "bert_config.json")  # a vocabulary
OWN_SETTINGS = "bertsmith_normalization"  # what Hugging Face's settings have no words for
RELEASED = re.compile(r"(uncased|cased|multilingual|chinese)_L-\d")  # Google's names of folders
MODEL_MAX_LENGTH = 512  # positions of the published models


def is_vocabulary(name: str, names: set[str]) -> bool:
    """True for the vocab.txt of a tokenizer, a model or a token store, which is no text.

    >>> is_vocabulary("a/vocab.txt", {"a/config.json"}), is_vocabulary("vocab.txt", {"a.txt"})
    (True, False)
    """
    folder = name.removesuffix(VOCABULARY_FILE)
    is_named_so = folder != name and (not folder or folder[-1] in "/\\")
    return is_named_so and any(folder + beside in names for beside in BESIDE)


def read_tokenizer(folder: Path) -> tuple[Vocabulary, Normalization]:
    """Read vocabulary and normalization of a model folder.

    The pieces come from `vocab.txt`, or else from `tokenizer.json`. Each setting comes from
    `tokenizer_config.json`, or else from the normalizer of `tokenizer.json`. A folder with neither
    is cased by the name that Google gave it ("multi_cased_L-12_H-768_A-12"), or else when a piece
    has an upper-case letter. Words may have 200 characters, as
    in Google's code, whatever `tokenizer.json` says.

    Errors: ValueError that names folder or file for no vocabulary or one of another kind than BERT.
    """
    names = TOKENIZER_CONFIG, TOKENIZER_FILE
    config, tokenizer = (read_optional_json(folder / name) for name in names)
    normalizer, own = _normalizer_settings(tokenizer, folder / TOKENIZER_FILE)
    _check_kind(folder, config, tokenizer, normalizer)
    if (folder / VOCABULARY_FILE).exists():
        vocabulary = Vocabulary.read(folder / VOCABULARY_FILE)
    elif tokenizer:
        vocabulary = _vocabulary_from(tokenizer, folder / TOKENIZER_FILE)
    else:
        fault = f"neither {VOCABULARY_FILE} nor {TOKENIZER_FILE} is there"
        hint = "name a model folder, or the folder that `bertsmith vocab` wrote"
        if not folder.exists():
            hint += "; that of a model on the hub is `bertsmith.load(name).tokenizer`"
        raise ValueError(f"{folder}: {fault}: {hint}")

    def setting(config_name: str, normalizer_name: str) -> bool | None:
        value = config.get(config_name)
        if value is None:
            value = normalizer.get(normalizer_name)
        if not isinstance(value, bool | None):
            raise ValueError(f"{folder}: {config_name} is {value!r}: it must be true or false")
        return value

    lowercase = setting("do_lower_case", "lowercase")
    if lowercase is None and (released := RELEASED.search(folder.resolve().name)):
        lowercase = released[1] != "cased"
    if lowercase is None:
        words = [piece.removeprefix("##") for piece in vocabulary.pieces]
        # Capitals of "<S>" and "[CLS]", which are no words, do not count.
        lowercase = not any(word.isalpha() and word != word.lower() for word in words)
    strips = setting("strip_accents", "strip_accents")
    settings = {
        "lowercase": lowercase,
        "strip_accents": "all" if (lowercase if strips is None else strips) else "none",
        "split_cjk": setting("tokenize_chinese_chars", "handle_chinese_chars") is not False,
    }
    if not isinstance(config.get(OWN_SETTINGS, {}), dict):
        fault = f"{OWN_SETTINGS} is {config[OWN_SETTINGS]!r:.60}"
        raise ValueError(f"{folder / TOKENIZER_CONFIG}: {fault}: it must be an object")
    try:
        normalization = Normalization(**settings | own | config.get(OWN_SETTINGS, {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / TOKENIZER_CONFIG}: {OWN_SETTINGS}: {error}") from error
    if lost := added_tokens(folder, vocabulary, normalization):
        _warn_of_added(str(folder), ", ".join(lost[:5]) + " ..." * (len(lost) > 5))
    return vocabulary, normalization


def added_tokens(folder: Path, vocabulary: Vocabulary, normalization: Normalization) -> list[str]:
    """Tokens of `add_tokens`, which Hugging Face's tokenizer keeps whole and ours cuts.

    Errors: ValueError for what is no list of them.
    """
    path = folder / TOKENIZER_FILE
    stored = read_optional_json(path).get("added_tokens") or []
    if not isinstance(stored, list):
        raise ValueError(f"{path}: added_tokens is {stored!r:.60}: it must be a list")
    contents = (token.get("content") for token in stored if isinstance(token, dict))
    found = [str(token) for token in (*contents, *read_optional_json(folder / ADDED_FILE))]

    def is_ours(token: str) -> bool:
        words = [word.characters for word in split_words(token, normalization)]
        own = *SPECIAL, vocabulary.pieces[vocabulary.unk_id]
        return token in own or (token in vocabulary.ids and words == [token])

    return [token for token in dict.fromkeys(found) if not is_ours(token)]


@functools.cache  # a folder is opened more than once in a command
def _warn_of_added(folder: str, names: str) -> None:
    added = f"tokens were added to its tokenizer ({names}), which bertsmith cuts into other pieces"
    effect = "texts that hold them will be read otherwise than in its training"
    print(f"warning: {folder}: {added}: {effect}", file=sys.stderr)


def write_tokenizer(
    folder: Path,
    vocabulary: Vocabulary,
    normalization: Normalization,
    max_length: int,
    token_types: bool,
) -> None:
    """Write `vocab.txt`, `tokenizer.json` and `tokenizer_config.json` into `folder`.

    `tokenizers` gives the same ids and offsets, except where its normalizer differs from Google's
    code (found by comparing all code points, alone and between letters): it takes a special token
    in raw text as that token, writes every lower-case sigma alike, drops characters for private
    use, leaves U+2B820..U+2B91F to the word around them, and knows the categories of an older
    Unicode (some hundred marks and signs). transformers 5 limits words to 100 characters. A piece
    listed twice stands in `tokenizer.json` once, with its later id: read it back from `vocab.txt`.
    """
    strips = normalization.strip_accents == "all"
    own = _own_settings(normalization)
    # By itself transformers returns no token types from a tokenizer of no named model.
    types = ["token_type_ids"] * token_types
    inputs = {"model_input_names": ["input_ids", *types, "attention_mask"]}
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    config = {
        # transformers builds a BertTokenizer from these settings alone, without the other file.
        "tokenizer_class": "PreTrainedTokenizerFast" if own else "BertTokenizer",
        "do_lower_case": normalization.lowercase,
        "strip_accents": None if strips == normalization.lowercase else strips,
        "tokenize_chinese_chars": normalization.split_cjk,
        **({OWN_SETTINGS: own} if own else {}),
        **(inputs if own or not token_types else {}),
        "model_max_length": max_length,
        **dict(zip(names, SPECIAL, strict=True)),
    }
    # The vocabulary last: without it the folder is no tokenizer, alone it would be one of other
    # settings.
    write_json(folder / TOKENIZER_CONFIG, config)
    write_json(folder / TOKENIZER_FILE, _tokenizer_json(vocabulary, normalization))
    vocabulary.write(folder / VOCABULARY_FILE)


def _tokenizer_json(vocabulary: Vocabulary, normalization: Normalization) -> dict[str, Any]:
    def part(kind: str, name: str, segment: int) -> dict[str, Any]:
        return {kind: {"id": name, "type_id": segment}}

    def text(name: str, segment: int) -> list[dict[str, Any]]:
        return [part("Sequence", name, segment), part("SpecialToken", "[SEP]", segment)]

    first = [part("SpecialToken", "[CLS]", 0), *text("A", 0)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocabulary.ids[token], "content": token, **flags, "special": True}
            for token in sorted(SPECIAL, key=vocabulary.ids.__getitem__)
        ],
        "normalizer": _normalizer(normalization),
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": first,
            "pair": [*first, *text("B", 1)],
            "special_tokens": {
                token: {"id": token, "ids": [vocabulary.ids[token]], "tokens": [token]}
                for token in ("[CLS]", "[SEP]")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": MAX_WORD,
            "vocab": vocabulary.ids,
        },
    }


def _own_settings(normalization: Normalization) -> dict[str, str]:
    """Settings that Hugging Face has no words for."""
    own: dict[str, str] = {}
    if normalization.strip_accents == "latin":
        own["strip_accents"] = "latin"
    if normalization.unicode != "none":
        own["unicode"] = normalization.unicode
    return own


def _normalizer(normalization: Normalization) -> dict[str, Any]:
    """BertNormalizer, with the form of Unicode before it and the stripping of Latin after it."""
    parts: list[dict[str, Any]] = [
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": normalization.split_cjk,
            "strip_accents": normalization.strip_accents == "all",
            "lowercase": normalization.lowercase,
        }
    ]
    if normalization.unicode != "none":
        parts.insert(0, {"type": normalization.unicode.upper()})
    if normalization.strip_accents == "latin":
        marks = {"Regex": r"(?<=\p{Latin})\p{Mn}+"}
        replace = {"type": "Replace", "pattern": marks, "content": ""}
        parts += [{"type": "NFD"}, replace, {"type": "NFC"}]
    return parts[0] if len(parts) == 1 else {"type": "Sequence", "normalizers": parts}


def _normalizer_settings(
    tokenizer: dict[str, Any], path: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """The BertNormalizer of a `tokenizer.json`, and our own settings from a sequence around it."""
    found = tokenizer.get("normalizer")
    if not isinstance(found, dict) or found.get("type") != "Sequence":
        return found if isinstance(found, dict) else {}, {}
    for values in itertools.product(*CHOICES.values()):
        normalization = Normalization(*values)  # pyright: ignore
        if _normalizer(normalization) == found:
            parts = {part["type"]: part for part in found["normalizers"]}
            return parts["BertNormalizer"], _own_settings(normalization)
    known = "it reads BertNormalizer, and the sequences that it writes"
    raise ValueError(f"{path}: a sequence of normalizers that bertsmith cannot follow: {known}")


def _check_kind(
    folder: Path, config: dict[str, Any], tokenizer: dict[str, Any], normalizer: dict[str, Any]
) -> None:
    """Refuse a tokenizer whose words or pieces would silently differ from ours."""
    words, basic = config.get("word_tokenizer_type", "basic"), config.get("do_basic_tokenize", True)
    found = [
        (TOKENIZER_CONFIG, "word_tokenizer_type", words, "basic"),
        (TOKENIZER_CONFIG, "do_basic_tokenize", basic, True),
    ]
    for section, name, expected in (
        ("model", "type", "WordPiece"),
        ("model", "continuing_subword_prefix", "##"),
        ("normalizer", "type", "BertNormalizer"),
        ("normalizer", "clean_text", True),
        ("pre_tokenizer", "type", "BertPreTokenizer"),
    ):
        settings = normalizer if section == "normalizer" else tokenizer.get(section)
        value = settings.get(name) if isinstance(settings, dict) else None
        if tokenizer:
            found.append((TOKENIZER_FILE, f"{name} of the {section}", value, expected))
    for file, name, value, expected in found:
        if value != expected:
            hint = "bertsmith reads the tokenizers of BERT models only: use another model"
            raise ValueError(f"{folder / file}: {name} is {value!r}, not {expected!r}: {hint}")


def _vocabulary_from(tokenizer: dict[str, Any], path: Path) -> Vocabulary:
    pieces = stored_pieces(tokenizer, path)
    try:
        return Vocabulary([piece.strip() for piece in pieces])  # as `vocab.txt` is read
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def stored_pieces(tokenizer: dict[str, Any], path: Path) -> list[str]:
    """The pieces of `tokenizer.json`, tokens added later included. Errors: ValueError."""
    try:
        added = [(str(token["content"]), token["id"]) for token in tokenizer["added_tokens"]]
        return numbered_pieces([*tokenizer["model"]["vocab"].items(), *added], path)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: no vocabulary in it as `tokenizers` writes it") from error


def numbered_pieces(stored: Iterable[tuple[str, Any]], path: Path) -> list[str]:
    """The pieces in the order of their ids; of two ids the last one counts.

    Errors: ValueError for what is no id, or a gap between them.
    """
    try:
        ids = {piece: int(number) for piece, number in stored}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: no vocabulary in it as `tokenizers` writes it") from error
    pieces = sorted(ids, key=ids.__getitem__)
    for number, piece in enumerate(pieces):
        if ids[piece] != number:
            fault = f"no piece has the id {number} ({piece!r} has {ids[piece]})"
            raise ValueError(f"{path}: {fault}: put the model's {VOCABULARY_FILE} beside it")
    return pieces
