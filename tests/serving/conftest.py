"""Small models, and a server of them that is asked without a socket."""

import pytest

from bertsmith.inference.engines.processor import choose_processor
from bertsmith.serving.models import ServedModel
from bertsmith.serving.operations import operations_of

from .serving_tools import application, ask
from .small_models import MODELS, write_models


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("compatible")
    write_models(made)
    return made


@pytest.fixture(scope="session")
def served(folders):
    """A function: names and a precision -> their models, opened once."""
    known = {}

    def open_models(*names, precision="float32"):
        for name in names:
            if (name, precision) not in known:
                processor = choose_processor("cpu", precision, "bertsmith")
                known[name, precision] = ServedModel.open(name, folders / name, processor)
                known[name, precision].warm_up()  # it may compile longer than a request waits
        return {name: known[name, precision] for name in names}

    return open_models


@pytest.fixture
def post(served):
    """A function: the answer of a server of all models, or of some, to a body."""

    def send(path, body, *names, precision="float32", headers=(), **settings):
        models = served(*(names or MODELS), precision=precision)
        with application(models, operations_of, **settings) as app:
            return ask(app, "POST" if body is not None else "GET", path, body or b"", headers)

    return send
