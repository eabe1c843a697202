"""A report as Markdown in one language, and as one HTML file that holds both.

The HTML needs nothing else: pictures and style are inside, there is no script, and the switch of
languages is a radio button.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator
from pathlib import Path

from common.study.plots import FOLDER, Picture
from common.study.report import Code, Heading, Paragraph, Part, Remarks, Report
from common.study.table import Table
from common.study.words import Language, Text

_MARKS = {"good": "✓", "bad": "✗", "note": "–"}

# ---- Markdown ----


def as_markdown(report: Report, language: Language, *, pictures: str = FOLDER) -> str:
    """Return the report in one language. pictures: the folder that its pictures are linked from."""
    parts = [f"# {report.title}", _of(report.subtitle, language)]
    parts += [_markdown(part, language, pictures) for part in report.parts]
    return "\n\n".join(parts) + "\n"


def table_as_markdown(table: Table, language: Language) -> str:
    """Return a pipe table; the first column to the left, the others to the right."""
    head = [_of(text, language) for text in table.head]
    lines = [head, ["---"] + ["---" if table.words else "---:"] * (len(head) - 1)]
    lines += [[_of(text, language) for text in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _markdown(part: Part, language: Language, pictures: str) -> str:
    match part:
        case Heading():
            return f"## {_of(part.text, language)}"
        case Paragraph():
            return _of(part.text, language)
        case Remarks():
            return "\n".join(f"- {_MARKS[mark]} {_of(text, language)}" for mark, text in part.lines)
        case Table():
            return table_as_markdown(part, language)
        case Picture():
            title = _of(part.title, language)
            image = f"![{title}]({pictures}/{part.name}.png)"
            return f"### {title}\n\n{image}\n\n{_of(part.caption, language)}"
        case Code():
            return f"{_of(part.title, language)}:\n\n```\n{part.text}\n```"


def _of(text: Text, language: Language) -> str:
    return text.en if language == "en" else text.zh


def _cell(text: str) -> str:
    """Return a cell whose text can end neither the column nor the row."""
    return " ".join(text.replace("|", "\\|").split())


# ---- HTML ----


def as_html(report: Report, folder: Path) -> str:
    """Return the report as one page. folder: of the study, whose pictures are read from plots."""
    body = "\n".join(_html(part, folder) for part in report.parts)
    title = html.escape(report.title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{_STYLE}</style>
</head>
<body>
<input type="radio" name="language" id="zh"><label for="zh">中文</label>
<input type="radio" name="language" id="en" checked><label for="en">English</label>
<main>
<h1>{title}</h1>
<p class="soft">{_both(report.subtitle)}</p>
{body}
</main>
</body>
</html>
"""


def _html(part: Part, folder: Path) -> str:
    match part:
        case Heading():
            return f"<h2>{_both(part.text)}</h2>"
        case Paragraph():
            return f"<p>{_both(part.text)}</p>"
        case Remarks():
            lines = (
                f'<li class="{mark}"><b>{_MARKS[mark]}</b><div>{_both(text)}</div></li>'
                for mark, text in part.lines
            )
            return f'<ul class="verdict">\n{chr(10).join(lines)}\n</ul>'
        case Table():
            return "\n".join(_html_table(part))
        case Picture():
            data = base64.b64encode((folder / FOLDER / f"{part.name}.png").read_bytes()).decode()
            return (
                f"<figure><h3>{_both(part.title)}</h3><figcaption>{_both(part.caption)}"
                f'</figcaption><img alt="{html.escape(part.title.en)}"'
                f' src="data:image/png;base64,{data}"></figure>'
            )
        case Code():
            return (
                f"<details><summary>{_both(part.title)}</summary>"
                f"<pre>{html.escape(part.text)}</pre></details>"
            )


def _html_table(table: Table) -> Iterator[str]:
    yield f'<div class="wide"><table{" class=words" if table.words else ""}>'
    yield (
        "<thead><tr>" + "".join(f"<th>{_both(text)}</th>" for text in table.head) + "</tr></thead>"
    )
    yield "<tbody>"
    for number, row in enumerate(table.rows):
        mark = table.marks[number] if table.marks else ""
        yield (
            f"<tr{f' class={chr(34)}{mark}{chr(34)}' if mark else ''}>"
            + "".join(f"<td>{_both(text)}</td>" for text in row)
            + "</tr>"
        )
    yield "</tbody></table></div>"


def _both(text: Text) -> str:
    if text.en == text.zh:
        return _inline(text.en)
    return f'<span lang="en">{_inline(text.en)}</span><span lang="zh">{_inline(text.zh)}</span>'


def _inline(text: str) -> str:
    escaped = html.escape(text)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped)


_STYLE = """\
:root { --back: #fff; --fore: #1b1f24; --soft: #57606a; --line: #d8dee4; --field: #f6f8fa;
  --good: #1a7f37; --bad: #b3261e; --bad-back: #fdeceb; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --fore: #e6e9ee; --soft: #9aa4b0;
  --line: #3a424c; --field: #1d2228; --good: #57c173; --bad: #ff8a80; --bad-back: #35201f; }
  img { filter: invert(.9) hue-rotate(180deg); } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 80rem; padding: 1.2rem; background: var(--back);
  color: var(--fore); font: 1rem/1.55 system-ui, "PingFang SC", "Microsoft YaHei",
  "Noto Sans CJK SC", sans-serif; }
body > input { position: absolute; opacity: 0; }
body > label { float: right; cursor: pointer; padding: .1rem .6rem; color: var(--soft);
  border-radius: .4rem; }
#en:checked + label, #zh:checked + label { background: var(--field); color: var(--fore);
  box-shadow: inset 0 0 0 1px var(--line); }
body > input:focus-visible + label { outline: 2px solid var(--fore); }
#en:checked ~ main [lang="zh"], #zh:checked ~ main [lang="en"] { display: none; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .2rem; clear: none; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; border-bottom: 1px solid var(--line); }
.soft, figcaption { color: var(--soft); }
.verdict { list-style: none; margin: 0; padding: 0; display: grid; gap: .5rem; }
.verdict li { display: flex; gap: .7rem; padding: .5rem .8rem; background: var(--field);
  border-left: .25rem solid var(--soft); border-radius: .2rem; overflow-wrap: anywhere; }
.verdict .good { border-color: var(--good); } .verdict .good > b { color: var(--good); }
.verdict .bad { border-color: var(--bad); } .verdict .bad > b { color: var(--bad); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: .3rem; }
td:last-child { min-width: 5rem; }
p, .words { max-width: 62rem; } .words th, .words td { text-align: left; }
td { white-space: nowrap; } td:last-child { white-space: normal; overflow-wrap: anywhere; }
tr.bad td { background: var(--bad-back); }
tr.bad strong { color: var(--bad); }
code, pre { font: .85em/1.5 ui-monospace, Consolas, monospace; }
pre { background: var(--field); padding: .8rem; overflow-x: auto; border-radius: .3rem; }
summary { cursor: pointer; margin: .4rem 0; }
figure { margin: 1.6rem 0; } figcaption { margin-bottom: .4rem; }
h3 { font-size: 1rem; margin: 0; }
img { max-width: min(100%, 62rem); height: auto; }
@media print { body { max-width: none; } body > label { display: none; }
  figure, tr, li { break-inside: avoid; } }
"""
