import pytest

from bertsmith.tasks.metrics import check_metrics
from bertsmith.tasks.task import GLUE, OWN_KINDS, TASKS, find_task, own_task


@pytest.mark.parametrize("name", ["sst2", "SST-2", "sst_2"])
def test_names_as_people_type_them(name):
    assert find_task(name) is TASKS["sst2"]


def test_unknown_task_names_the_nearest():
    with pytest.raises(ValueError, match="unknown task 'mprc': did you mean 'mrpc'?"):
        find_task("mprc")


def test_the_nine_of_glue_with_their_metrics():
    """Paper section 4.1 and GLUE's own list (the caption of Table 1 leaves CoLA's out)."""
    metrics = {task.name: task.metrics for task in GLUE}
    assert metrics == {
        "cola": ("matthews",),
        "sst2": ("accuracy",),
        "mrpc": ("f1", "accuracy"),
        "stsb": ("pearson", "spearman"),
        "qqp": ("f1", "accuracy"),
        "mnli": ("accuracy",),
        "qnli": ("accuracy",),
        "rte": ("accuracy",),
        "wnli": ("accuracy",),
    }


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_every_row_is_whole(task):
    check_metrics(task.metrics, task.task_type, len(task.labels or ()))
    assert {"train"} <= set(task.files) and task.main_metric == task.metrics[0]
    assert (task.task_type == "choice") == bool(task.options)
    assert (task.task_type == "regress") == (task.bounds is not None)
    assert (task.task_type == "classify") == (task.labels is not None)


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_own_kinds_have_fitting_metrics(kind):
    options = ("a", "b") if kind == "choice" else ()
    task = own_task(kind, "text", None, "label", options=options)
    check_metrics(task.metrics, kind, 3)
    assert task.dev_splits == ("dev",)


def test_own_mistakes():
    with pytest.raises(ValueError, match="column 'review' is named twice: .* different columns"):
        own_task("classify", "review", "review", "stars")
    with pytest.raises(ValueError, match="column 'b' is named twice"):
        own_task("choice", "text", None, "label", options=("a", "b", "b"))
    with pytest.raises(ValueError, match="unknown kind of task 'clasify': did you mean 'classify'"):
        own_task("clasify", "a", None, "b")
    with pytest.raises(ValueError, match=r"separator ', ': name one character"):
        own_task("multilabel", "a", None, "b", separator=", ")
    with pytest.raises(ValueError, match="choice needs `options`"):
        own_task("choice", "a", None, "b")
    with pytest.raises(ValueError, match="`options` are for choice, not for regress"):
        own_task("regress", "a", None, "b", options=("c",))
