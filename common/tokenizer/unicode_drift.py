"""What tells fast tokenizer libraries from the exact one: a text for comparison, and the characters
that libraries classify differently, because each has the Unicode tables of its release.

GPT-2's pattern asks whether a character is a letter, a digit or neither. Unicode 17.0 made letters
and digits of 4,657 code points that 16.0 leaves unassigned. gigatoken 0.10 knows 17.0; tiktoken
0.13 and 0.14 and tokenizers 0.23 know 16.0. A comparison of the three on every code point found
these; they agree on all others.
"""

from __future__ import annotations

import numpy as np

from common.tokenizer.bpe_files import END_OF_TEXT

_BMP = "\u088f\u0c5c\u0cdc\ua7ce\ua7cf\ua7d2\ua7d4\ua7f1"
_RANGES = """
10940-10959 10EC5-10EC7 11DB0-11DDB 11DE0-11DE9 16EA0-16EB8 16EBB-16ED3 16FF2-16FF6 187F8-187FF
18D09-18D1E 18D80-18DF2 1E6C0-1E6DE 1E6E0-1E6E2 1E6E4-1E6E5 1E6E7-1E6ED 1E6F0-1E6F4 1E6FE-1E6FF
2B73A-2B73F 2CEA2-2CEAD 323B0-33479
"""
_BEYOND = [(int(first, 16), int(last, 16)) for first, last in (each.split("-") for each in _RANGES.split())]
DISPUTED = (*((ord(char), ord(char)) for char in _BMP), *_BEYOND)
"""First and last code point of each range."""

_BORDERS = np.array([border for first, last in _BEYOND for border in (first, last + 1)], dtype=np.uint32)


SELF_CHECK = "\n".join(
    [
        "Hello world, it's I'm you're we've they'll he'd don't 'S 'T ''s 'sx 'lll x'd.",
        " gazed  two   three    four\t tab\t\ttabs \n \n\n  \r\n end of lines \n\n\n x",
        "0 12 345 6789 1e-9 3.14159 ½ ² Ⅷ ٣٤٥ ४५६ 一二三 x1y2 1a 2 b",
        "!? ... --- *** === ///// «quotes» “curly” ‘single’ it’s — – … • § © ™ € £ ¥ ₿",
        "naïve café Ångström e\u0301 Straße ŒUVRE İstanbul ıi ǅ ﬁ ǆ",
        "Ελληνικά Русский Українська עִבְרִית العربية فارسی हिन्दी বাংলা தமிழ் ไทย ລາວ မြန်မာ ქართული Հայերեն አማርኛ",
        "中文字符,日本語ひらがなカタカナ한국어 𠀀𠮷 ﾊﾝｶｸ 全角　スペース 。、「」",
        "😀😃🏽👩‍👩‍👧‍👦🇬🇧🏳️‍🌈❤️ 1️⃣ 𝒜𝓑 𝟘𝟙 ☃ a😀b",
        "".join(map(chr, range(0x21))) + "\x7f\x80\x85x\x85 \x9f\xa0x\xa0 \xad",
        "\u1680 \u180e\u2000\u2003 \u200a\u200b\u200d\u2028 \u2029\u202f\u205f\u3000x\u3000"
        " \ufeff\ufffd\uffff\U0010ffff \ue000",
        f"{END_OF_TEXT} x{END_OF_TEXT}{END_OF_TEXT} <|endoftext |>",
        "a" * 300 + " " * 300 + "x" + "-" * 300 + "中" * 100 + "\n" * 300 + "8" * 300 + " ",
        "internationalization Antidisestablishmentarianism supercalifragilisticexpialidocious qzxjkvbw ZQXJKVBW",
        "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # note\n\n\tif x!=None:\r\n\t\tpass",
    ]
)
"""Text for the comparison of two encoders, with what a hand-written lexer may get wrong: scripts,
emoji, digits, contractions, white space, control characters, long runs.
"""


def is_disputed(text: str) -> bool:
    """Return whether ``text`` holds a character of ``DISPUTED``.

    Speed: about 0.5 GB/s on text that is not ASCII; ASCII text costs nothing. Raises
    UnicodeEncodeError for a lone surrogate.
    """
    if text.isascii():
        return False
    # eight scans at the speed of memchr; a regular expression takes ten times as long
    if any(char in text for char in _BMP):
        return True
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    codes = codes[codes > 0xFFFF]
    return bool((np.searchsorted(_BORDERS, codes, side="right") % 2).any())
