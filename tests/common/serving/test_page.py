"""The page without a browser: one file, nothing from elsewhere, every word in both languages. The
address that the server listens on, and the key that it asks for.
"""

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from common.config.schema import ServeConfig
from common.errors import ConfigError
from common.processes.addresses import is_loopback
from common.serving import protocol
from common.serving.server import listen, read_key
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
    words = {name: set(re.findall(r'(\w+): "', re.sub(r'(?<=: )"[^"]*"', '"', body))) for name, body in languages}
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


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_the_script_is_javascript(tmp_path: Path) -> None:
    (tmp_path / "page.js").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(["node", "--check", tmp_path / "page.js"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_address_that_is_taken_or_not_here() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"serve.port={port}: cannot listen there"):
            listen(ServeConfig(port=port))
    with pytest.raises(ConfigError, match=r"serve\.host=192\.0\.2\.1"):  # kept for documentation
        listen(ServeConfig(host="192.0.2.1", port=0))
    with pytest.raises(ConfigError, match=r"serve\.host=a\.\.b"):
        listen(ServeConfig(host="a..b", port=0))
    with listen(ServeConfig(port=0)) as listener:
        assert (listener.getsockname()[0], listener.proto) == ("127.0.0.1", socket.IPPROTO_TCP)


def test_addresses_that_only_this_machine_reaches() -> None:
    own = ("127.0.0.1", "127.9.9.9", "::1", "localhost", "LocalHost.")
    others = ("0.0.0.0", "::", "10.0.0.1", "example", "localhost..")
    assert [host for host in (*own, *others) if is_loopback(host)] == [*own]


def test_the_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(" secret\n")
    settings = ServeConfig(api_key_file=str(file))
    assert read_key(settings, "other") == "secret"
    assert read_key(ServeConfig(), "other") == "other" and read_key(ServeConfig(), None) is None
    for content in ("", "two words", "two\nlines", "\u5bc6\u94a5"):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"api_key_file=.*visible ASCII") as caught:
            read_key(settings, None)
        assert not content or content not in str(caught.value)
    with pytest.raises(ConfigError, match="GPT2_API_KEY: expected"):
        read_key(ServeConfig(), "")
