"""What other libraries say, as one line of ours."""

import pytest

from packing.errors import one_line


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("full", "full"),
        ("", "ValueError"),
        ("\n \n", "ValueError"),
        ("\n  out of memory \ntrace\nmore", "out of memory"),
        ("field 'width':\n    expected int\nhint", "field 'width': expected int"),
        ("field 'width':", "field 'width':"),
    ],
)
def test_one_line_of_any_error(said: str, line: str) -> None:
    """The first line that says something, with what its colon announces; an error's type if it is silent."""
    assert one_line(ValueError(said)) == line
