"""A GPT pre-trained from left to right, gone on with, measured and fine-tuned."""

import json

import numpy as np
import torch

from bertsmith.checkpoints.config_json import read_stored_config
from bertsmith.checkpoints.model_folder import load_model
from bertsmith.checkpoints.reading import load_tokenizer
from bertsmith.model.heads import PreTrainingModel

from ...tiny import animal_sentences, bertsmith, refused, write, write_store

HOW = [
    *("--max-length", 24, "--batch-size", 16, "--num-evals", 1, "--device", "cpu"),
    *("--threads", 1, "--precision", "float32"),
]


def test_from_text_to_answers(tmp_path):
    texts = [animal_sentences(3, seed) for seed in range(60)]
    store = write_store(tmp_path / "store", texts)
    run, more, task = (tmp_path / name for name in ("run", "more", "task"))
    # a single layer whose heads begin at their neighbours finds a word anywhere only later
    new = ["--objective", "ltr", "--size", "1x64", "--steps", 60, "--lr", 3e-3]
    new += ["--init-scheme", "paper"]
    given = ["pretrain", "--corpus", store, *HOW]
    bertsmith(*given, "--architecture", "gpt", *new, "--out", run)
    stored = read_stored_config(run)
    assert (stored["model_type"], stored["architectures"]) == (
        "openai-gpt",
        ["OpenAIGPTLMHeadModel"],
    )
    model, tokenizer = load_model(run, PreTrainingModel).model.eval(), load_tokenizer(run)

    # what was measured is the mean loss of rows of text alone
    measured = json.loads(bertsmith("evaluate", run, "--held-out", store, "--json"))["metrics"]
    assert measured["ltr_loss"] < measured["unigram_entropy"] - 0.5
    ids = torch.from_numpy(tokenizer.encode_batch([texts[0][0]]).ids[None].astype(np.int64))
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        logits = model(ids, torch.zeros_like(ids), None, positions).mlm_logits
    assert (logits[:-1].argmax(1) == ids[0, 1:]).float().mean() > 0.5

    bertsmith(*given, "--model", run, "--objective", "ltr", "--steps", 2, "--out", more)
    assert json.loads((more / "run.json").read_text())["settings"]["architecture"] == "gpt"

    lines = (f"{text}\t{'cat' in text}" for text in animal_sentences(80, 1))
    data = write(tmp_path / "data.tsv", ["text\tlabel", *lines])
    how = ["--epochs", 10, "--batch-size", 8, "--lr", 3e-3, "--max-retries", 0]
    how += ["--device", "cpu", "--threads", 1]
    bertsmith("finetune", "classify", "--data", data, "--model", run, "--out", task, *how)
    size = len(tokenizer.vocabulary)
    assert load_tokenizer(task).vocabulary.borders == (size, size + 1, size + 2)
    found = json.loads(bertsmith("evaluate", task, "--data", data, "--json"))["metrics"]
    assert found["accuracy"] > 0.95


def test_what_a_gpt_cannot_learn(tmp_path):
    given = ["pretrain", "--corpus", tmp_path, "--out", tmp_path / "out", "--steps", 9]
    line = refused(*given, "--architecture", "gpt")
    assert "--objective mlm+nsp: a GPT reads from left to right: --objective ltr" in line
