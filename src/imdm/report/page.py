"""Assembling a report from sections: one Markdown file, and one self-contained HTML page."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from imdm.core.console import appearing, frames, ink
from imdm.core.files import write_text
from imdm.report.tables import Table

STYLE = Path(__file__).with_name("page.css")


UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Control characters that a byte-level model may generate and no page should contain."""


@dataclass(frozen=True)
class Picture:
    """An image with a name and a caption."""

    name: str
    svg: str
    caption: str

    @property
    def file(self) -> str:
        """Its path relative to report.md."""
        return f"pictures/{self.name}.svg"

    @property
    def address(self) -> str:
        """The image as a data URL, which needs no network."""
        return "data:image/svg+xml," + quote(" ".join(self.svg.split()), safe=" /:;,=?@!$'()*+<>|[]{}^`~")

    def markdown(self) -> str:
        return f"![{self.caption}]({self.file})"

    def html(self) -> str:
        caption = html.escape(self.caption)
        return (
            f'<figure><img src="{self.address}" alt="{caption}"><figcaption class=note>{caption}</figcaption></figure>'
        )


@dataclass(frozen=True)
class Written:
    """A text, with the step at which each piece of it appeared (−1: given)."""

    label: str
    pieces: Sequence[tuple[str, int]]
    steps: int

    def markdown(self) -> str:
        prompt = " ".join("".join(text for text, step in self.pieces if step < 0).split())
        text = " ".join("".join(text for text, step in self.pieces).split())
        if prompt and text.startswith(prompt):
            text = f"*{prompt}*{text[len(prompt) :]}"
        return f"> **{self.label}** {text}"

    def html(self) -> str:
        spans = []
        for text, step in self.pieces:
            style = "font-weight:600" if step < 0 else "color:rgb({},{},{})".format(*ink(step, self.steps))
            title = "given" if step < 0 else f"step {step + 1}"
            spans.append(f'<span style="{style}" title="{title}">{html.escape(text)}</span>')
        return f"<p class=written><b>{html.escape(self.label)}</b> {''.join(spans)}</p>"


@dataclass(frozen=True)
class Beside:
    """Texts or pictures side by side, stacked on a narrow screen."""

    parts: Sequence[Written] | Sequence[Picture]

    def markdown(self) -> str:
        between = "\n>\n" if isinstance(self.parts[0], Written) else "\n\n"
        return between.join(part.markdown() for part in self.parts)

    def html(self) -> str:
        kind = "beside" if isinstance(self.parts[0], Written) else '"beside pictures"'
        return f"<div class={kind}>{''.join(part.html() for part in self.parts)}</div>"


@dataclass(frozen=True)
class Strip:
    """A text during generation: after some steps, the revealed tokens and the masks."""

    label: str
    pieces: Sequence[tuple[str, int]]
    steps: int

    def markdown(self) -> str:
        lines = appearing(self.pieces, self.steps)
        return "\n".join([f"**{self.label}**, after so many steps:", "", "```", *lines, "```"])

    def html(self) -> str:
        rows = []
        for frame in frames(self.steps):
            spans = "".join(
                f"<span>{html.escape(text)}</span>" if step < frame else f"<s>{html.escape(text)}</s>"
                for text, step in self.pieces
            )
            rows.append(f"<p class=written><b>after {frame}</b> {spans}</p>")
        return f"<figure class=strip><figcaption>{html.escape(self.label)}</figcaption>{''.join(rows)}</figure>"


Part = Table | Picture | Written | Beside | Strip


@dataclass(frozen=True)
class Section:
    """A section of a page.

    folded: collapsed on the page, and left out of Markdown; aside: text for the page only; printed: its tables are
    shown in the terminal too; highlights: figures that stand large at the top of the page, with what they are."""

    title: str
    text: str = ""
    parts: Sequence[Part] = ()
    folded: bool = False
    aside: str = ""
    printed: bool = False
    highlights: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Report:
    title: str
    lead: str
    highlights: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = ()
    facts: dict[str, str] = field(default_factory=dict)

    def markdown(self) -> str:
        parts = [f"# {self.title}", self.lead]
        parts += [f"- **{value}** {label}" for value, label in self.highlights]
        for section in (s for s in self.sections if not s.folded):
            parts += [f"## {section.title}", section.text, *(part.markdown() for part in section.parts)]
        parts.append(" · ".join(f"{name}: {value}" for name, value in self.facts.items()))
        return "\n\n".join(part for part in parts if part) + "\n"

    def html(self) -> str:
        tiles = "".join(f"<div><b>{html.escape(v)}</b><span>{html.escape(t)}</span></div>" for v, t in self.highlights)
        body = [f"<h1>{html.escape(self.title)}</h1><p class=lead>{html.escape(self.lead)}</p>"]
        body.append(f"<div class=big>{tiles}</div>" if tiles else "")
        for section in self.sections:
            title, text = html.escape(section.title), html.escape(f"{section.text} {section.aside}".strip())
            body.append(f"<details><summary>{title}</summary>" if section.folded else f"<h2>{title}</h2>")
            body.append(f"<p>{text}</p>" if text else "")
            body += [part.html() for part in section.parts]
            body.append("</details>" if section.folded else "")
        facts = " · ".join(f"{html.escape(name)}: {html.escape(value)}" for name, value in self.facts.items())
        return (
            "<!doctype html><html lang=en><head><meta charset=utf-8>"
            '<meta name=viewport content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(self.title)}</title><style>{STYLE.read_text(encoding='utf-8')}</style></head>"
            f"<body><main>{''.join(body)}</main><footer class=facts>{facts}</footer></body></html>\n"
        )

    def write(self, folder: Path, page: Path | None = None) -> Path:
        """`report.html`, `report.md` and its pictures in the folder; with `page`, only that page."""
        target = page or folder / "report.html"
        files = {target: self.html()}
        if page is None:
            files[folder / "report.md"] = self.markdown()
            parts = [part for section in self.sections for part in section.parts]
            pictures = [one for part in parts for one in (part.parts if isinstance(part, Beside) else [part])]
            files |= {folder / one.file: one.svg for one in pictures if isinstance(one, Picture)}
        for path, text in files.items():
            write_text(path, UNPRINTABLE.sub("\ufffd", text))
        return target
