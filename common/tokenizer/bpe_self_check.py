"""Text for the comparison of two encoders: scripts, emoji, digits, contractions, white space,
control characters, long runs.

It holds what a hand-written lexer may get wrong. A fast backend must agree with the exact one on it
before use.
"""

from __future__ import annotations

from common.tokenizer.bpe_files import END_OF_TEXT

SELF_CHECK = "\n".join(
    [
        "Hello world, it's I'm you're we've they'll he'd don't 'S 'T ''s 'sx 'lll x'd.",
        " gazed  two   three    four\t tab\t\ttabs \n \n\n  \r\n end of lines \n\n\n x",
        "0 12 345 6789 1e-9 3.14159 ½ ² Ⅷ ٣٤٥ ४५६ 一二三 x1y2 1a 2 b",
        "!? ... --- *** === ///// «quotes» “curly” ‘single’ it’s — – … • § © ™ € £ ¥ ₿",
        "naïve café Ångström e\u0301 Straße ŒUVRE İstanbul ıi ǅ ﬁ ǆ",
        "Ελληνικά Русский Українська עִבְרִית العربية فارسی हिन्दी বাংলা தமிழ் ไทย ລາວ မြန်မာ"
        " ქართული Հայերեն አማርኛ",
        "中文字符,日本語ひらがなカタカナ한국어 𠀀𠮷 ﾊﾝｶｸ 全角　スペース 。、「」",
        "😀😃🏽👩‍👩‍👧‍👦🇬🇧🏳️‍🌈❤️ 1️⃣ 𝒜𝓑 𝟘𝟙 ☃ a😀b",
        "".join(map(chr, range(0x21))) + "\x7f\x80\x85x\x85 \x9f\xa0x\xa0 \xad",
        "\u1680 \u180e\u2000\u2003 \u200a\u200b\u200d\u2028 \u2029\u202f\u205f\u3000x\u3000"
        " \ufeff\ufffd\uffff\U0010ffff \ue000",
        f"{END_OF_TEXT} x{END_OF_TEXT}{END_OF_TEXT} <|endoftext |>",
        "a" * 300 + " " * 300 + "x" + "-" * 300 + "中" * 100 + "\n" * 300 + "8" * 300 + " ",
        "internationalization Antidisestablishmentarianism supercalifragilisticexpialidocious"
        " qzxjkvbw ZQXJKVBW",
        "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # note\n\n\tif x!=None:\r\n\t\tpass",
    ]
)
