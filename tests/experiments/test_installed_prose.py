"""The quickstart's text: what is taken from source files, and what is left out."""

import textwrap

import pytest

from bertsmith.experiments.installed_prose import Module, harvest_prose, prose_paragraphs

from ..tiny import write

SHAPES = '''
"""Areas and lengths of plain figures, for drawing programs."""


class Circle:
    """A circle is given by its middle and its radius.

    >>> Circle(1).area()
    3.14159 is the area of this circle here
    """

    def area(self):
        r"""Return how much room there is inside of the circle."""
        def helper():
            """Move the middle of it to the origin first."""

    if True:
        async def draw(self):
            """Draw the circle with the pen that is in use."""


add_docstring(area, """
    The area of a figure counts the squares within it.

    It is never negative, whatever the figure may be.
""")
'''
SAME = '''"""A circle is given by its middle and its radius.

Nothing else is needed to draw one on paper."""'''
TOPICS = "topics = {'assert': 'Assert statements are a convenient way to check things.\\n',\n}"


@pytest.fixture
def packages(tmp_path):
    files = {
        "shapes/__init__.py": '"""Figures of the plane and what they have in common."""',
        "shapes/circle.py": SHAPES,
        "shapes/other.py": SAME,
        "pydoc_data/topics.py": TOPICS,
        "alone.py": '"""A module of its own, without a package around it."""',
        "shapes/tests/test_circle.py": '"""This text of a test is never to be seen at all."""',
        "shapes/_vendor/copy.py": '"""This copied text is never to be seen at all."""',
        "broken.py": '"""This file cannot be parsed by any Python."""\ndef (:',
        "nothing.py": '"""Too short."""',
        "site-packages/more.py": '"""A folder of other packages is a root of its own."""',
    }
    for name, text in files.items():
        write(tmp_path / name, text)
    write(tmp_path / "latin.py", b'"""Caf\xe9 without a coding line is an error here."""')
    return tmp_path


def test_harvest(packages):
    circle = "A circle is given by its middle and its radius."
    modules = list(harvest_prose([packages], workers=1))
    alone = ["A module of its own, without a package around it."]
    assert modules[0] == Module("alone", "alone", alone, alone)
    topic = ["Assert statements are a convenient way to check things."]
    assert modules[1] == Module("pydoc_data.topics.assert", "pydoc_data", topic, [])
    assert [m.name for m in modules[2:]] == ["shapes", "shapes.circle", "shapes.other"]
    assert {m.package for m in modules[2:]} == {"shapes"}
    assert modules[3].docstrings == [
        "Areas and lengths of plain figures, for drawing programs.",
        circle,
        "Return how much room there is inside of the circle.",
        "Move the middle of it to the origin first.",
        "Draw the circle with the pen that is in use.",
        "The area of a figure counts the squares within it.\n"
        "It is never negative, whatever the figure may be.",
    ]
    # The paragraph was seen before, the docstring as a whole was not.
    assert modules[4].paragraphs == ["Nothing else is needed to draw one on paper."]
    assert modules[4].docstrings == [f"{circle}\nNothing else is needed to draw one on paper."]


def test_the_number_of_workers_changes_nothing(packages):
    assert list(harvest_prose([packages], workers=2)) == list(harvest_prose([packages], workers=1))


def paragraphs(text: str) -> list[str]:
    return prose_paragraphs(textwrap.dedent(text))


def test_numpy_style():
    text = """
        Return the sum of all elements over
        the given axis.

        Parameters
        ----------
        a : array_like
            Elements to sum, see `the
            manual <https://example.org>`_.
        axis : None or int or tuple of ints, optional
        dtype, out : objects
            The type of the result and of the sum within.

        Notes
        -----
        ======  ==================
        name    what it is of all
        ======  ==================

        Arithmetic is modular [1]_ for *all* of the ``int`` types.

        .. [1] A. Author, The book of sums, the press, 1999.
        .. versionadded:: 1.7.0
           This new thing was added for good reasons.
        .. note:: Partial sums are used to be more exact.
        """
    assert paragraphs(text) == [
        "Return the sum of all elements over the given axis.",
        "Elements to sum, see the manual.",
        "The type of the result and of the sum within.",
        "Arithmetic is modular for all of the int types.",
        "Partial sums are used to be more exact.",
    ]


def test_google_and_sphinx_style():
    text = """
        Args:
            path (str, optional): Where the file is to
                be written at the end.
            mode (str):
                How the file is to be opened.
            seed: A number that decides what is drawn.

        :param int x: The number that is to be doubled.
        :returns: Twice the number, as :class:`~numbers.Real` again.

        - The first point of a list
          goes over two lines.
        - The second point of this list.

        Here is how it is used::

            this code is not prose at all, is it

        ```python
        neither is this line of some code
        ```

        The energy is \\\\frac{1}{2} of mass times speed.
        x = f(y) + g[z] for i in a.b
        """
    assert paragraphs(text) == [
        "Where the file is to be written at the end.",
        "How the file is to be opened.",
        "A number that decides what is drawn.",
        "The number that is to be doubled.",
        "Twice the number, as Real again.",
        "The first point of a list goes over two lines.",
        "The second point of this list.",
        "Here is how it is used:",
    ]
