import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


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
