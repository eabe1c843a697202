"""Text that a terminal takes late, or never."""

import io
import sys
import threading

import pytest

from common.launcher.terminal import Terminal
from tests.common.launcher.started import until


def test_a_reader_that_stops_loses_nothing_soon_and_later_hears_how_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = threading.Event()

    class Stopped(io.StringIO):
        def write(self, text: str) -> int:
            goes_on.wait(30)
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", out := Stopped())
    terminal = Terminal()
    texts = [f"loss {number}\n" for number in range(100)] + ["x" * (1 << 22)]
    for text in [*texts, "not read\n", "nor this\n"]:
        terminal.copy(text)
    terminal.say("a rank has failed")
    terminal.copy("at the end\n")
    goes_on.set()
    until(lambda: terminal._taken == terminal._given)
    terminal.copy("read again\n")
    terminal.close()
    assert out.getvalue() == "".join(texts) + (
        "\n[18 characters are left out here; the log has them]\na rank has failed\n"
        "[11 characters are left out here; the log has them]\nread again\n"
    )
