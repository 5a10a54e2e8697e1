"""The few pieces of SVG that all plots are made of."""

from collections.abc import Iterable
from html import escape


def text(x: float, y: float, what: object, *, anchor: str = "middle", size: int = 12, extra: str = "") -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}{extra and ' ' + extra}>{escape(str(what))}</text>"


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """Elements on white paper."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    style = 'font-family="system-ui, sans-serif" fill="#222"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    return "\n".join([begin, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"
