"""A page of HTML as tests look at it."""

from html.parser import HTMLParser

VOID = {"meta", "link", "input", "img", "br"}


class Page(HTMLParser):
    """Refuses elements that are not closed in order. ``elements``: names and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def values(self, *names: str) -> list[str]:
        """Values of the attributes of these names, in order."""
        return [value for _, given in self.elements for name, value in given.items() if name in names]
