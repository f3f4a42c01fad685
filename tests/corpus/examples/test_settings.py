"""Settings of examples that contradict each other are named, with a hint."""

import pytest

from bertsmith.corpus.examples.settings import ExampleSettings


@pytest.mark.parametrize(
    "values",
    [
        {"max_length": 4},
        {"mlm_probability": 0.0},
        {"short_seq_prob": 1.5},
        {"max_predictions_per_seq": 0},
        {"mask_replace_prob": 0.9, "random_replace_prob": 0.2},
        {"objective": "clm"},
        {"masking": "phrase"},
        {"nsp_sampling": "dirty"},
    ],
)
def test_impossible_settings_are_named(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        ExampleSettings(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"objective": "ltr", "mlm_probability": 0.3},
            "mlm_probability = 0.3.*masks nothing: leave mlm_probability",
        ),
        ({"objective": "ltr", "masking": "span"}, "masking = span"),
        ({"objective": "ltr", "max_predictions_per_seq": 9}, "max_predictions_per_seq = 9"),
        (
            {"objective": "mlm", "short_seq_prob": 0.5},
            "short_seq_prob = 0.5: .*mlm has no pairs.*take",
        ),
        (
            {"objective": "mlm", "nsp_sampling": "clean"},
            "nsp_sampling = clean.*mlm has no pairs.*another",
        ),
        (
            {"max_length": 24, "max_predictions_per_seq": 22},
            "max_length = 24 has 21 tokens.*1 to 21, or raise",
        ),
    ],
)
def test_contradictions_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        ExampleSettings(**values)


def test_width_of_predictions():
    assert ExampleSettings(128, mlm_probability=0.3).num_predictions == 38
    assert ExampleSettings(24, max_predictions_per_seq=21).num_predictions == 21
    assert (
        ExampleSettings(24, mlm_probability=1.0).num_predictions == 21
    )  # all but the special ones
    assert ExampleSettings(24, objective="ltr").num_predictions == 23
