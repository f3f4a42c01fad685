"""The cells of an experiment: which model they are of."""

from bertsmith.base.files import write_json
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.experiments.paper.work import forget_other, model_digests
from bertsmith.text.readers.tables import digest
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


def test_an_unfinished_cell_of_another_pre_training_begins_anew(tmp_path, capsys):
    folder, out = random_model(tmp_path / "model", word_tokenizer(["a man"])), tmp_path / "cell"
    (out / "seeds/1").mkdir(parents=True)
    write(out / "cell.lock", "")
    own = [digest(folder / "model.safetensors")]
    RunFolder(out).write_settings({"kind": "finetune", "settings": {"model_sha256": own}})
    forget_other(out, folder)
    assert (out / "seeds/1").exists() and not capsys.readouterr().err
    random_model(folder, word_tokenizer(["a man"]), seed=2)
    forget_other(out, folder)
    assert [path.name for path in out.iterdir()] == ["cell.lock"]
    assert "cell: begins anew: the pre-training that it builds on" in capsys.readouterr().err
