"""A sample of a corpus that costs little: the beginning of every file, in equal shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bertsmith.text.readers import input_files, read_documents

SAMPLE = 1_000_000  # characters
MAX_FILES = 1_000  # opened for it; of more, so many at equal distances


def sample_lines(
    inputs: Sequence[Path | str], *, text_column: str = "text", characters: int = SAMPLE
) -> list[str]:
    """Lines from the beginning of each file, together at most `characters`; the last is cut.

    A file shorter than its share is taken whole, and what it leaves over is not made up for. What
    only stands late in a file is not seen: a compressed file cannot be entered in its middle.

    Errors: those of `read_documents`.
    """
    files = input_files(inputs)
    files = files[:: -(-len(files) // MAX_FILES)]
    lines = []
    for path in files:
        left = characters // len(files)
        for document in read_documents([path], text_column=text_column):
            for line in document.lines:
                lines.append(line[:left])
                left -= len(lines[-1])
                if left == 0:
                    break
            if left == 0:
                break
    return lines
