"""Text that is not JSON is a ValueError, however deep it is."""

import pytest

from shardfn.stored.json_text import parsed


def test_it_is_json() -> None:
    assert parsed(b'{"a": [1, null]}') == parsed('{"a": [1, null]}')
    assert parsed("[1.5]") == [1.5]


@pytest.mark.parametrize("text", ["", "[", b"\xff", "[" * 100_000, '{"a":' * 100_000])
def test_other_text_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parsed(text)
