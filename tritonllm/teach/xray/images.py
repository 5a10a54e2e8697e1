"""The PNG files of the x-ray: an attention pattern, and a logit lens."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from tritonllm.teach.xray.lens import Guess

Spell = Callable[[int], str]
MOST_LABELS, MOST_LETTERS = 48, 12
SHOWN = 5  # tokens of a layer
SHARES = (0.0, 0.05, 0.2, 0.5, 1.0)  # marked beside a pattern
MAP = "magma_r"


def label_of(token: int, spell: Spell) -> str:
    """A token as text that a font can draw: blanks and line ends are shown, and what has no glyph is a number."""
    text = spell(token).replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    glyphs = get_font(findfont("DejaVu Sans")).get_charmap()
    if not text or any(ord(letter) not in glyphs for letter in text):
        return f"#{token}"
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"


def draw_attention(weights: torch.Tensor, token_ids: Sequence[int], spell: Spell, title: str, file: Path) -> None:
    """Write ``weights[T, T]``, a row for each query; the root makes small weights visible."""
    count = len(token_ids)
    edge = min(11.0, 3.5 + 0.16 * count)
    figure = Figure(figsize=(edge + 1.0, edge), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    shares = np.ma.masked_equal(np.sqrt(weights.numpy()), 0.0)  # white: what it cannot see
    drawn = axes.imshow(shares, cmap=MAP, vmin=0, vmax=1, interpolation="nearest")
    bar = figure.colorbar(drawn, ax=axes, shrink=0.8)
    bar.set_ticks([share**0.5 for share in SHARES], labels=[f"{100 * share:g}%" for share in SHARES])
    if count <= MOST_LABELS:
        labels = [label_of(token, spell) for token in token_ids]
        axes.set_xticks(range(count), labels=labels, rotation=90, fontsize=7, parse_math=False)
        axes.set_yticks(range(count), labels=labels, fontsize=7, parse_math=False)
    axes.set(xlabel="key: the token that is looked at", ylabel="query: the token that looks", title=title)
    save(figure, file)


def draw_lens(guesses: Sequence[Guess], spell: Spell, title: str, file: Path) -> None:
    """Write a row for each layer, the last one on top, with its likeliest tokens from the left to the right."""
    tops = [guess.top(SHOWN) for guess in guesses]
    shares = np.array([[share for _, share in top] for top in tops])
    rows, columns = shares.shape
    figure = Figure(figsize=(1.5 + 1.5 * columns, 1.4 + 0.3 * rows), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.imshow(shares, cmap=MAP, vmin=0, vmax=1, aspect="auto", origin="lower")
    for row, top in enumerate(tops):
        for column, (token, share) in enumerate(top):
            text = f"{label_of(token, spell)} {100 * share:.0f}%"
            colour = "white" if share > 0.45 else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour, parse_math=False)
    axes.set_yticks(range(rows), labels=[guess.place for guess in guesses], fontsize=8)
    axes.set_xticks(range(columns), labels=[f"{at + 1}." for at in range(columns)])
    axes.set(title=title)
    figure.colorbar(drawn, ax=axes, shrink=0.8, label="probability")
    save(figure, file)


def save(figure: Figure, file: Path) -> None:
    FigureCanvasAgg(figure).print_png(str(file), metadata={"Software": None})  # no date: the same image, the same file
