"""The cells of an experiment: which model they are of."""

from bertsmith.base.files import write_json
from bertsmith.experiments.paper.work import model_digests
from bertsmith.text.tokenizer.files import TOKENIZER_FILES

from ..tiny import random_model, word_tokenizer, write


def test_a_model_that_lowers_letters_is_another(tmp_path):
    found = []
    for name, lowers in (("a", True), ("b", True), ("c", False)):
        folder = random_model(tmp_path / name, word_tokenizer(["a man"]))
        write_json(folder / "tokenizer_config.json", {"do_lower_case": lowers})
        found.append(model_digests(folder))
    assert found[0] == found[1] and found[0] != found[2]


def test_a_gpt_of_other_merges_is_another(tmp_path):
    found = []
    for name, merges in (("a", "#\nn e"), ("b", "#\nn e"), ("c", "#\ne n")):
        folder = random_model(tmp_path / name, word_tokenizer(["a man"]))
        for file in TOKENIZER_FILES:
            (folder / file).unlink()
        write(folder / "vocab.json", "{}")
        write(folder / "merges.txt", merges)
        found.append(model_digests(folder))
    assert found[0] == found[1] and found[0] != found[2]
