"""The frame of a report page: one file, no links, readable on paper and on a phone."""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from PIL import Image

_STYLE = """
:root { color-scheme: light }
body { font: 14px/1.45 system-ui, sans-serif; color: #222;
  max-width: 1080px; margin: 24px auto; padding: 0 16px }
h1 { font-size: 22px; margin: 0 0 4px }
h2 { font-size: 17px; margin: 32px 0 8px; border-bottom: 1px solid #ddd }
h3 { font-size: 14px; margin: 20px 0 4px } p { margin: 6px 0 } .muted { color: #666 } .bad { color: #c62828 }
table { border-collapse: collapse; margin: 8px 0; font-variant-numeric: tabular-nums }
.wide { overflow-x: auto }
th, td { padding: 3px 10px; border-bottom: 1px solid #e6e6e6; text-align: right; vertical-align: top }
th:first-child, td:first-child { text-align: left } th { font-weight: 600; background: #f6f6f6 }
td.text { text-align: left; max-width: 460px } .charts { display: flex; flex-wrap: wrap; gap: 12px }
.thumbs { display: flex; flex-wrap: wrap; gap: 6px; margin: 4px 0 10px }
.steps { display: flex; flex-wrap: wrap; gap: 4px 28px; align-items: flex-end }
.step { max-width: 100% } .step p { max-width: 320px }
figure { margin: 0; text-align: center }
figcaption { font-size: 11px; color: #666 }
img { image-rendering: auto; border: 1px solid #bbb; display: block }
.now img { border: 2px solid #222 } .key { display: inline-block; margin: 0 12px 2px 0; white-space: nowrap }
.key i { display: inline-block; width: 10px; height: 10px; margin-right: 4px }
pre { background: #f6f6f6; padding: 8px; white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0 }
details { margin: 6px 0 } summary { cursor: pointer }
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole page around its parts."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: Sequence[int] = ()) -> str:
    """A table of plain text; columns in `text_columns` are set flush left."""

    def cells(row: Sequence[str], tag: str) -> str:
        marks = (' class="text"' if k in text_columns and tag == "td" else "" for k in range(len(row)))
        return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))

    lines = [f"<tr>{cells(row, 'td')}</tr>" for row in rows]
    return (
        f'<div class="wide"><table><tr>{cells(head, "th")}</tr>' + "".join(lines) + "</table></div>"
        if lines
        else ""
    )


def key(entries: Iterable[tuple[str, str]]) -> str:
    """A legend of (label, colour)."""
    items = (
        f'<span class="key"><i style="background:{c}"></i>{escape(label)}</span>' for label, c in entries
    )
    return f'<p class="keys">{"".join(items)}</p>'


def picture(path: Path, *, caption: str = "", width: int = 128, current: bool = False) -> str:
    """A JPEG as part of the page, at most `width` pixels wide; a file that cannot be read becomes a note."""
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
            if image.width > width:
                image = image.resize((width, max(1, round(image.height * width / image.width))))
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=82)
            # Small pictures are shown enlarged by whole factors, or nobody could see what is in them.
            shown = image.width * max(1, width // image.width)
    except OSError:
        return f'<figure class="bad">{escape(path.name)} cannot be read</figure>'
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return (
        f'<figure class="{"now" if current else "then"}">'
        f'<img width="{shown}" alt="{escape(caption or path.name)}" '
        f'src="data:image/jpeg;base64,{data}"><figcaption>{escape(caption)}</figcaption></figure>'
    )
