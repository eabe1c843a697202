"""Text that arrives in pieces and ends before a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from common.tokenizer.base import TextStream


class StopText:
    """Passes text through, up to the first stop string.

    The stop string that is complete first counts. If several end at the same character, the
    longest one counts. So it does not matter into which pieces the text is cut.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """stop: strings of at least one character."""
        self.found: str | None = None
        """The stop string that has ended the text."""
        self._stop = stop
        self._held = ""

    def push(self, text: str, final: bool = False) -> str:
        """Add ``text`` and return what can be shown now. The possible beginning of a stop string is
        held back. final: nothing follows.
        """
        if self.found is not None:
            return ""
        text = self._held + text
        matches = [(place + len(stop), place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if matches:
            _, place, self.found = min(matches)
            self._held = ""
            return text[:place]
        held = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` may begin ``stop``."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if stop.startswith(text[-size:])), 0)


class GrowingText:
    """The text of a sequence of tokens that grows, up to the first stop string."""

    def __init__(self, stream: TextStream, stop: Sequence[str] = ()) -> None:
        """stream: decodes the sequence."""
        self.text = ""
        """Whole characters, and no part of a stop string."""
        self._stream = stream
        self._stop = StopText(stop)
        self._read = 0

    @property
    def is_stopped(self) -> bool:
        return self._stop.found is not None

    def advance(self, tokens: Sequence[int], final: bool = False) -> None:
        """Read the new part of ``tokens``, the whole sequence. final: it will not grow."""
        new = self._stream.push(tokens[self._read :], final)
        self._read = len(tokens)
        self.text += self._stop.push(new, final)
