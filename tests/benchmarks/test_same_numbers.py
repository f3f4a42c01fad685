"""The commands of benchmarks/same_numbers.py, where one would end them all."""

import json

from bertsmith.model.config import config_for
from bertsmith.text.tokenizer.tokenizer import Tokenizer

from ..tiny import animal_sentences, bertsmith, random_model, write_store


def test_what_was_pretrained_is_measured_on_its_store(module, tmp_path, monkeypatch):
    words, written = module("same_numbers").USE["evaluate"]
    assert not written
    store = write_store(tmp_path / "store", [animal_sentences(3, seed) for seed in range(60)])
    tokenizer = Tokenizer.from_pretrained(store)
    random_model(tmp_path / "run", tokenizer, config=config_for("1x64", len(tokenizer.vocabulary)))
    monkeypatch.chdir(tmp_path)
    assert "mlm_loss" in json.loads(bertsmith(*words.split()))["metrics"]
