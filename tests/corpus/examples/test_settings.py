"""Settings of examples that contradict each other are named, with a remedy."""

import pytest

from bertsmith.corpus.examples.settings import ExampleSettings


@pytest.mark.parametrize(
    "values",
    [
        {"length": 4},
        {"mask_rate": 0.0},
        {"short_rate": 1.5},
        {"max_predictions": 0},
        {"mask_share": 0.9, "keep_share": 0.2},
        {"objective": "clm"},
        {"masking": "phrase"},
        {"pairs": "dirty"},
    ],
)
def test_impossible_settings_are_named(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        ExampleSettings(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"objective": "ltr", "mask_rate": 0.3}, "mask_rate = 0.3.*masks nothing: leave mask_rate"),
        ({"objective": "ltr", "masking": "span"}, "masking = span"),
        ({"objective": "ltr", "max_predictions": 9}, "max_predictions = 9"),
        ({"objective": "mlm", "short_rate": 0.5}, "short_rate = 0.5: .*mlm has no pairs.*take"),
        ({"objective": "mlm", "pairs": "clean"}, "pairs = clean.*mlm has no pairs.*another"),
        ({"length": 24, "max_predictions": 22}, "length = 24 has 21 tokens.*1 to 21, or raise"),
    ],
)
def test_contradictions_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        ExampleSettings(**values)


def test_width_of_predictions():
    assert ExampleSettings(128, mask_rate=0.3).num_predictions == 38
    assert ExampleSettings(24, max_predictions=21).num_predictions == 21
    assert ExampleSettings(24, mask_rate=1.0).num_predictions == 21  # all but the special ones
    assert ExampleSettings(24, objective="ltr").num_predictions == 23
