"""Stop strings against their definition read character by character, in any pieces."""

import random

from common.generation.stop_strings import GrowingText, StopText
from common.tokenizer.streams import ByteStream


def by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text before a stop string, and the string: the first one that is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def may_go_on(text: str, stops: list[str]) -> int:
    """Characters at the end of a text that a stop string may begin with."""
    held = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(held, default=0)


def test_random_texts_in_random_pieces() -> None:
    draw = random.Random(0)
    stopped = 0
    for _ in range(2000):
        text = "".join(draw.choices("ab\n。", k=draw.randrange(12)))
        stops = [
            "".join(draw.choices("ab\n。", k=draw.randint(1, 4))) for _ in range(draw.randint(0, 3))
        ]
        expected, stop = by_definition(text, stops)
        reader, at, shown = StopText(stops), 0, ""
        while at < len(text):
            piece = text[at : at + draw.randint(1, 5)]
            at += len(piece)
            shown += reader.push(piece)
            before = by_definition(text[:at], stops)
            if before[1] is None:
                assert shown == text[: at - may_go_on(text[:at], stops)]
        assert reader.found == stop
        assert shown + reader.push("", final=True) == expected
        stopped += stop is not None
    assert 500 < stopped < 1500


def test_a_sequence_of_bytes_is_read_once_and_shows_whole_characters() -> None:
    tokens = list("é跑。b".encode())
    growing = GrowingText(ByteStream(bytes), ["。"])
    seen = []
    for size in range(1, len(tokens) + 1):
        growing.advance(tokens[:size])
        seen.append(growing.text)
        if growing.is_stopped:
            break
    assert seen == ["", "é", "é", "é", "é跑", "é跑", "é跑", "é跑"]
    assert size == len("é跑。".encode())
    growing.advance(tokens, final=True)
    assert growing.text == "é跑"
