import pytest

from bertsmith.tasks.metrics import METRICS
from bertsmith.tasks.table import TASKS, find_task, own_task


@pytest.mark.parametrize("name", ["sst2", "SST-2", "sst_2"])
def test_names_as_people_type_them(name):
    assert find_task(name) is TASKS["sst2"]


def test_unknown_task_names_the_nearest():
    with pytest.raises(ValueError, match="unknown task 'mprc': did you mean 'mrpc'?"):
        find_task("mprc")


def test_every_row_has_known_metrics_and_its_own_name():
    for key, task in TASKS.items():
        assert task.name == key
        assert set(task.metrics) <= set(METRICS)
    assert TASKS["mrpc"].main_metric == "f1"


def test_own_columns_must_differ():
    with pytest.raises(ValueError, match="must name different columns"):
        own_task("review", "review", "stars")
