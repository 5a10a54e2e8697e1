"""The screen. It looks at a source some times a second, and draws what it gets."""

import signal
import threading
from collections.abc import Callable

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.events import Resize
from textual.widget import Widget
from textual.widgets import Footer

from tritonllm.teach.dashboard import draw
from tritonllm.teach.dashboard.source import SnapshotSource
from tritonllm.telemetry.snapshot import MOST_CELLS, MOST_ROWS, MOST_STEPS, Snapshot, View

EVERY = 0.1  # seconds between two looks
PANELS = 4
WIDE = 110  # columns from which on the panels stand side by side
STATUS_STYLES = {"running": draw.GREEN, "paused": draw.ORANGE, "ended": draw.SKY, "bad": draw.RED}


class Panel(Widget):
    """A widget that draws one part of the snapshot.

    Args:
        name: the id of the widget.
        paint: draws a snapshot in so many columns and rows.
        title: says what is drawn.
    """

    def __init__(
        self,
        name: str,
        paint: Callable[[Snapshot, int, int], Text],
        title: Callable[[Snapshot], str] | None = None,
    ) -> None:
        super().__init__(id=name)
        self._paint, self._title, self._snapshot = paint, title, Snapshot()

    def show(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        if self._title is not None:
            self.border_title = Text(self._title(snapshot)).markup
        self.refresh()

    def render(self) -> Text:
        width, height = self.content_size
        return self._paint(self._snapshot, width, height) if width > 0 and height > 0 else Text()


class Headline(Widget):
    """What is looked at, and how it goes."""

    def __init__(self) -> None:
        super().__init__(id="headline")
        self._text = Text()

    def show(self, source: SnapshotSource, note: str) -> None:
        status = source.status()
        self._text = Text(f"{source.title}  ", no_wrap=True, overflow="ellipsis")
        self._text.append(f"● {status.text}", style=f"bold {STATUS_STYLES[status.kind]}")
        if source.gate is not None and source.gate.speed:
            self._text.append(f"  at most {source.gate.speed:g} steps/s")
        if note:
            self._text.append(f"  {note}", style="dim")
        self.refresh()

    def render(self) -> Text:
        return self._text


class Dashboard(App[None]):
    """The dashboard's application for the terminal.

    Args:
        source: what to look at.
        every: how many seconds there are between two looks.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "tritonllm dashboard"
    CSS = """
    #headline { height: 1; padding: 0 1; text-style: bold; }
    #counters { height: 3; padding: 0 1; }
    #pool, #steps, #requests { border-top: solid $primary; padding: 0 1; }
    #pool { height: 6; }
    #steps { height: 5; }
    #requests { height: 1fr; }
    #panels { layout: vertical; height: 1fr; }
    Screen.wide #panels { layout: grid; grid-size: 2 2; grid-columns: 3fr 2fr; grid-rows: 2fr 1fr; }
    Screen.wide #requests { row-span: 2; height: 100%; }
    Screen.wide #pool { height: 100%; }
    Screen.wide #steps { height: 100%; }
    Screen.wide #counters { height: 2; }
    """
    BINDINGS = [  # noqa: RUF012 - textual reads it
        Binding("space", "turn", "pause"),
        Binding("n", "let_one", "next step"),
        Binding("plus,equals_sign", "change_speed(-1)", "faster", key_display="+"),
        Binding("minus", "change_speed(1)", "slower", key_display="-"),
        Binding("down,j", "scroll_list(1)", "scroll", key_display="↑↓"),
        Binding("up,k", "scroll_list(-1)", show=False),
        Binding("pagedown", "scroll_list(10)", show=False),
        Binding("pageup", "scroll_list(-10)", show=False),
        Binding("home", "scroll_list(-1000000)", show=False),
        Binding("end", "scroll_list(1000000)", show=False),
        Binding("t", "turn_theme", "light/dark"),
        Binding("s", "save_picture", "picture"),
        Binding("q,ctrl+c,ctrl+q", "quit", "quit", key_display="q", priority=True),
    ]

    def __init__(self, source: SnapshotSource, every: float = EVERY) -> None:
        super().__init__()
        self.source, self.snapshot, self._every, self._first = source, Snapshot(), every, 0

    def compose(self) -> ComposeResult:
        yield Headline()
        yield Panel("counters", lambda snapshot, w, h: draw.flow(draw.counter_items(snapshot), w, h))
        with Container(id="panels"):
            yield Panel("requests", draw.requests, draw.requests_title)
            yield Panel("pool", draw.pool, draw.pool_title)
            yield Panel(
                "steps", lambda snapshot, w, h: draw.steps(snapshot.steps, w, h), lambda s: draw.steps_title(s.steps)
            )
        yield Footer()

    def on_mount(self) -> None:
        if threading.current_thread() is threading.main_thread() and not self.is_headless:
            import asyncio

            for number in (signal.SIGINT, signal.SIGTERM):  # so that the terminal is left as it was
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self.set_interval(self._every, self.look)
        self.call_after_refresh(self.look)

    def on_resize(self, event: Resize) -> None:
        self.screen.set_class(event.size.width >= WIDE, "wide")
        self.call_after_refresh(self.look)

    def view(self) -> View:
        """What there is room for."""
        requests, pool, steps = (
            self.query_one(f"#{name}", Panel).content_size for name in ("requests", "pool", "steps")
        )
        return View(
            first_row=self._first,
            rows=min(max(0, requests.height - 1), MOST_ROWS),
            cells=min(draw.pool_cells(pool.width, pool.height), MOST_CELLS),
            steps=min(max(0, steps.width), MOST_STEPS),
        )

    def look(self) -> None:
        if self.source.is_over:
            self.exit()
            return
        if len(self.query(Panel)) < PANELS:
            return  # the screen is not made yet, or being taken down
        before, self.snapshot = self.snapshot, self.source.look(self.view())
        self._first = self.snapshot.first_row
        self.query_one(Headline).show(self.source, self.snapshot.note)
        if self.snapshot != before:
            for panel in self.query(Panel):
                panel.show(self.snapshot)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that are of no use here are not offered."""
        return self.source.gate is not None if action in ("turn", "let_one", "change_speed") else True

    def action_turn(self) -> None:
        if self.source.gate is not None:
            self.source.gate.turn()
            self.look()

    def action_let_one(self) -> None:
        if self.source.gate is not None:
            self.source.gate.let_one()
            self.look()

    def action_change_speed(self, by: int) -> None:
        if self.source.gate is not None:
            self.source.gate.change_speed(by)
            self.look()

    def action_scroll_list(self, by: int) -> None:
        self._first = max(0, self._first + by)
        self.look()

    def action_turn_theme(self) -> None:
        self.theme = "textual-dark" if self.theme == "textual-light" else "textual-light"

    def action_save_picture(self) -> None:
        try:
            path = self.save_screenshot("tritonllm-dashboard.svg")
        except OSError as error:
            self.notify(f"the picture could not be written: {error}", severity="error")
        else:
            self.notify(f"{path} was written")
