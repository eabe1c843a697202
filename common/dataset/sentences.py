"""Cut a document into sentences by rule.

Rules need no model to download (nltk's punkt does) and give the same result everywhere. A sentence
ends
* at . ! ? or an ellipsis, with its closing quotes and brackets, if white space follows,
  - but not after a known abbreviation ("Mr.", "e.g."), after a single capital letter ("J. Smith"),
    or before a small letter ("etc. and so on");
* at a Chinese full stop, exclamation or question mark (not a semicolon), with its closing quotes,
even without a space;
* at a blank line.
"""

from __future__ import annotations

import re

_ABBREVIATIONS = """
    mr mrs ms dr prof rev hon st sr jr messrs mme mlle capt col gen lt sgt maj cmdr gov sen rep pres
    vol vols ch chap fig figs p pp ed eds cf vs viz approx e.g i.e a.m p.m u.s u.k inc ltd co corp
    jan feb mar apr jun jul aug sep sept oct nov dec
"""
_KNOWN = frozenset(_ABBREVIATIONS.split())
_CLOSING = "\"'\u201d\u2019)\\]}»」』\uff09】》"
_BOUNDARY = re.compile(
    # The match begins where a run of signs begins, and does not backtrack. Otherwise a run of a
    # million signs would take hours.
    rf"(?P<latin>(?<![.!?…])[.!?…]++[{_CLOSING}]*+)(?=\s)"
    rf"|(?:[。\uff01\uff1f]+|……)[{_CLOSING}]*"
    r"|(?=\n[ \t]*\n)"
)
_LAST_WORD = re.compile(r"([^\s(\[\"'\u201c\u2018]+)\.$")


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """Return the sentences of ``text`` in order, without empty ones.

    keep_newlines: False drops the white space between sentences, like Megatron's
    ``--split-sentences``. True leaves it at the end of the sentence before, so that the joined
    sentences equal the text.
    """
    ends = [match.end() for match in _BOUNDARY.finditer(text) if _is_end(text, match)]
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    if not keep_newlines:
        return [stripped for piece in pieces if (stripped := piece.strip())]
    sentences: list[str] = []
    leading = ""
    for piece in pieces:
        # White space leads the next piece. Move it to the sentence before; the first one keeps it.
        body = piece.lstrip()
        space = piece[: len(piece) - len(body)]
        if sentences:
            sentences[-1] += space
        else:
            leading += space
        if body:
            sentences.append(body if sentences else leading + body)
    return sentences


def _is_end(text: str, match: re.Match[str]) -> bool:
    if match["latin"] is None:
        return True
    after = text[match.end() : match.end() + 200].lstrip()
    if after[:1].islower():
        return False
    if match["latin"] != ".":
        return True
    word = _LAST_WORD.search(text, max(0, match.start() - 40), match.end())
    if word is None:
        return True
    name = word.group(1)
    return name.lower() not in _KNOWN and not (len(name) == 1 and name.isupper() and name != "I")
