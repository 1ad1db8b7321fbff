"""Every wrong call of docs/reference/wrong-calls.md gets the message that stands there, and never a traceback of ours."""

from __future__ import annotations

import pytest
from wrong_calls import CALLS, COMMANDS, message, table


@pytest.mark.parametrize("line", [*CALLS, *COMMANDS])
def test_a_wrong_call_gets_its_message(line: str) -> None:
    assert message(line) == table()[line]


def test_the_page_has_every_call_and_no_other() -> None:
    assert list(table()) == [*CALLS, *COMMANDS]
