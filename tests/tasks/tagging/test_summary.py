import pytest

from bertsmith.tasks.tagging.sentences import read_sentences
from bertsmith.tasks.tagging.summary import case_warning, split_sentences, summarize_sentences
from bertsmith.text.tokenizer.normalize import GOOGLE_CASED, GOOGLE_UNCASED


def read(path, text):
    path.write_text(text, encoding="utf-8")
    return read_sentences(path)


def texts(sentences):
    edges = sentences.boundaries
    return [" ".join(sentences.words[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def test_documents_stay_whole(tmp_path):
    documents = [f"-DOCSTART- O\n\nd{d % 6} B-X\n\ns{d % 6} O\n\n" for d in range(8)]
    sentences = read(tmp_path / "a", "".join(documents))  # the last two repeat the first
    train, dev = split_sentences(sentences, 0.3, seed=1)
    assert len(set(texts(dev))) == 4 and not set(texts(train)) & set(texts(dev))
    assert sorted(texts(train) + texts(dev)) == sorted(texts(sentences))
    assert texts(split_sentences(sentences, 0.3, seed=1)[1]) == texts(dev)
    assert texts(split_sentences(sentences, 0.3, seed=2)[1]) != texts(dev)
    with pytest.raises(ValueError, match="a: a single document cannot be split: name a dev set"):
        split_sentences(sentences.select([0, 1]), 0.3, seed=1)


def test_without_documents_sentences_are_split(tmp_path):
    sentences = read(tmp_path / "a", "".join(f"w{k} O\n\n" for k in range(10)))
    train, dev = split_sentences(sentences, 0.2, seed=1)
    assert (len(train), len(dev)) == (8, 2)


@pytest.mark.parametrize(
    "rare", ["w B-Y\nw I-Y\n\n", "-DOCSTART- O\n\nw B-Y\n\nw O\n\n", "w B-Y\n\nw B-Y\n\n"]
)
def test_a_tag_of_one_place_stays_in_train(tmp_path, rare):
    border = "-DOCSTART- O\n\n" if "DOCSTART" in rare else ""
    rest = "".join(f"{border}v{k} B-X\nv I-X\n\n" for k in range(5))
    sentences = read(tmp_path / "a", rest + rare)
    for seed in range(20):
        train, dev = split_sentences(sentences, 0.5, seed)
        assert set(train.tags) == set(sentences.tags) and "B-Y" not in dev.tags
        assert len(set(texts(dev))) == 3
        assert texts(split_sentences(sentences, 0.5, seed)[1]) == texts(dev)


def test_when_every_document_has_a_tag_of_its_own(tmp_path):
    sentences = read(tmp_path / "a", "a NN\n\nb VB\n\nc JJ\n")
    with pytest.raises(ValueError, match="a: every document has a tag that no other has: name a"):
        split_sentences(sentences, 0.5, seed=1)
    named = read(tmp_path / "b", "a B-X\n\nb B-Y\n\nc O\n")  # O is a class whatever train has
    assert texts(split_sentences(named, 0.5, seed=1)[1]) == ["c"]
    unnamed = read(tmp_path / "c", "a O\n\nb O\n")
    assert len(split_sentences(unnamed, 0.5, seed=1)[1]) == 1


def test_the_summary(tmp_path):
    train = read(tmp_path / "a", "-DOCSTART- O\n\nAnn B-PER\nB I-PER\nYes O\n\nRome B-LOC\n")
    dev = read(tmp_path / "b", "Rome B-LOC\n\nRome B-LOC\n\nNo O\n")
    assert summarize_sentences(train, dev).split("\n") == [
        "train: 2 sentences in 1 documents, 4 words; IOB2, 2 entities: PER 50.0%, LOC 50.0%;"
        " words in a sentence: median 2, longest 3",
        "dev:   3 sentences, 3 words; IOB2, 2 entities: LOC 100.0%;"
        " words in a sentence: median 1, longest 1",
        "exact duplicates: 2 sentences of dev are also in train",
    ]
    plain = read(tmp_path / "c", "Ann NNP\nsings VBZ\n")
    nothing = read(tmp_path / "d", "no O\n")
    text = summarize_sentences(plain, nothing)
    assert "plain, 2 tags: NNP 50.0%, VBZ 50.0%;" in text
    assert "IOB2, 0 entities; words" in text
    assert "2 entities: unnamed 100.0%" in summarize_sentences(
        read(tmp_path / "e", "a B\nb B\n"), plain
    )


def test_an_uncased_model_for_names_is_said(tmp_path):
    names = read(tmp_path / "a", "Ann B-PER\nsings O\n")
    assert case_warning(names, GOOGLE_UNCASED).startswith("warning: the model's vocabulary is unc")
    assert not case_warning(names, GOOGLE_CASED)
    assert not case_warning(read(tmp_path / "b", "ann B-PER\nsings O\n"), GOOGLE_UNCASED)
    assert not case_warning(read(tmp_path / "c", "Ann NNP\nsings VBZ\n"), GOOGLE_UNCASED)
