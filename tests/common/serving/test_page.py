"""The page without a browser: one file, nothing from elsewhere, every word in both languages."""

import re
from pathlib import Path

from common.serving import protocol
from tests.html_page import Page

TEXT = Path(protocol.__file__).with_name("page.html").read_text(encoding="utf-8")
SCRIPT = TEXT.split("<script>")[1].split("</script>")[0]


PAGE = Page(TEXT)


def test_nothing_comes_from_elsewhere() -> None:
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bimport\b|innerHTML|eval\(", TEXT)
    assert PAGE.values("src", "href", "action", "srcset") == ["data:,"]
    assert re.findall(r'fetch\("([^"]+)"', SCRIPT) == ["v1/completions", "v1/models"]


def test_every_word_is_there_in_both_languages() -> None:
    languages = re.findall(r"^  (en|zh): \{\n(.*?)^  \},", SCRIPT, flags=re.S | re.M)
    words = {
        name: set(re.findall(r'(\w+): "', re.sub(r'(?<=: )"[^"]*"', '"', body)))
        for name, body in languages
    }
    assert words["en"] == words["zh"] and len(words["en"]) > 25
    used = set(PAGE.values("data-text", "data-label"))
    used |= set(re.findall(r'word\("(\w+)"\)', SCRIPT))
    used |= set(re.findall(r'kind(?::| =) "(\w+)"', SCRIPT)) - {"wrong"}
    assert len(used) > 20 and used <= words["en"], used - words["en"]


def test_elements_that_the_script_names_exist_and_the_facts_that_it_shows_are_sent() -> None:
    ids = PAGE.values("id")
    assert len(ids) == len(set(ids)) and set(re.findall(r'\$\("(\w+)"\)', SCRIPT)) <= set(ids)
    numbers = re.findall(r'"(\w+)"', SCRIPT.split("const NUMBERS = [")[1].split("]")[0])
    assert set(numbers) <= set(ids) & set(protocol.CompletionRequest.model_fields)
    shown = set(re.findall(r"meta\.(\w+)", SCRIPT))
    sent = Path(protocol.__file__).with_name("completions.py").read_text(encoding="utf-8")
    assert len(shown) == 6 and all(f'"{name}": ' in sent for name in shown)
