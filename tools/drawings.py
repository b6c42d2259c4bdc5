"""Draw the pictures of docs/concepts.md into docs/images: ``make drawings``.

Plain SVG: boxes, arrows and text on a light background card, so that the page may be white or dark. The
output is deterministic, and needs no package.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 760
INK, QUIET, LINE, CARD = "#222222", "#5a5f66", "#9aa0a6", "#f8f8f5"
#: The palette of Okabe and Ito, lightened, since the text on them is dark.
BLUE, GREEN, ORANGE, GREY = "#9ccbe8", "#8fd4bb", "#f3c987", "#e3e3df"
FONT, CODE = "Helvetica, Arial, sans-serif", "ui-monospace, Menlo, Consolas, monospace"
_SHAPE = f'<path d="M0 0L8 4L0 8z" fill="{QUIET}"/>'
_AT = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
ARROW = f'<defs><marker id="head" {_AT}>{_SHAPE}</marker></defs>'
#: The approximate width of a character relative to the font size, to check that a text fits its box.
_EM = 0.56


class Drawing:
    """A picture being drawn; later parts cover earlier ones."""

    def __init__(self, height: int, says: str) -> None:
        """``says``: a description of the picture, for readers who cannot see it."""
        self._height = height
        self._says = says
        self._parts: list[str] = []

    def box(self, x: int, y: int, width: int, text: str, colour: str = GREY, height: int = 30) -> None:
        """Draw a box with centered text."""
        if len(text) * 13 * _EM > width:
            raise ValueError(f"{text!r} is too long for {width} px")
        where = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        self._parts.append(f'<rect {where} rx="5" fill="{colour}" stroke="{LINE}"/>')
        if text:
            self.text(x + width // 2, y + height // 2 + 5, text, anchor="middle", size=13, colour=INK)

    def text(
        self, x: int, y: int, text: str, *, anchor: str = "start", size: int = 13, colour: str = QUIET
    ) -> None:
        """Draw one line of text; ``anchor`` says which part of it is at ``x``. In backquotes: as code."""
        code = text.startswith("`")
        family = f' font-family="{CODE}"' if code else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{family}>'
            f"{html.escape(text.strip('`'))}</text>"
        )

    def line(
        self, x: int, y: int, to_x: int, to_y: int, *, arrow: bool = False, dashed: bool = False
    ) -> None:
        """Draw a line, with ``arrow`` one that ends in an arrowhead."""
        head = ' marker-end="url(#head)"' if arrow else ""
        dashes = ' stroke-dasharray="4 4"' if dashed else ""
        stroke = f'stroke="{QUIET}" stroke-width="1.3" fill="none"{head}{dashes}'
        self._parts.append(f'<path d="M{x} {y}L{to_x} {to_y}" {stroke}/>')

    def svg(self) -> str:
        """Return the contents of the SVG file."""
        size = f'viewBox="0 0 {WIDTH} {self._height}" width="{WIDTH}"'
        title = f"<title>{html.escape(self._says)}</title>"
        card = f'<rect width="{WIDTH}" height="{self._height}" rx="8" fill="{CARD}"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}">{title}'
        return "\n".join((head, ARROW, card, *self._parts, "</svg>\n"))


def work() -> Drawing:
    """A call starts, compute goes on, await takes the result."""
    it = Drawing(
        190, "A call starts an all_reduce; the program computes while it is in flight, then awaits it"
    )
    it.text(20, 75, "your program")
    it.text(20, 145, "network")
    it.box(130, 56, 130, "call", BLUE)
    it.box(260, 56, 300, "compute something else", GREY)
    it.box(560, 56, 60, "await", BLUE)
    it.box(620, 56, 120, "use the result", GREEN)
    it.box(200, 126, 390, "all_reduce in flight", ORANGE)
    it.line(200, 86, 200, 124, arrow=True)
    it.line(590, 126, 590, 90, arrow=True)
    it.text(130, 40, "`work = ac.all_reduce(x)`", colour=INK)
    it.text(740, 40, "`total = await work`", colour=INK, anchor="end")
    it.text(
        130, 177, "A Work is the handle of what is in flight: await it once, twice, or from another task."
    )
    return it


def lane() -> Drawing:
    """Two tasks are scheduled differently on two ranks; each lane has one order."""
    it = Drawing(
        250, "Two ranks schedule two tasks in different order; within each lane the order is the same"
    )
    train, evaluate = ("train 1", "train 2", "train 3"), ("eval 1", "eval 2")
    orders = {
        "rank 0": (train[0], evaluate[0], train[1], evaluate[1], train[2]),
        "rank 1": (train[0], train[1], evaluate[0], train[2], evaluate[1]),
    }
    it.text(20, 30, "as each rank's event loop schedules two tasks:", colour=INK)
    for row, (rank, order) in enumerate(orders.items()):
        it.text(20, 65 + 38 * row, rank)
        for place, call in enumerate(order):
            it.box(90 + 86 * place, 45 + 38 * row, 78, call, BLUE if call in train else ORANGE)
    it.text(545, 65, "with one order for all calls")
    it.text(545, 84, "eval 1 would meet train 2")
    it.line(20, 131, 740, 131, dashed=True)
    it.text(20, 158, "on two lanes, in the same order on both ranks:", colour=INK)
    lanes = (('`lane="train"`', train, BLUE), ('`lane="eval"`', evaluate, ORANGE))
    for row, (name, calls, colour) in enumerate(lanes):
        it.text(20, 193 + 36 * row, name, colour=INK)
        for place, call in enumerate(calls):
            it.box(150 + 86 * place, 173 + 36 * row, 78, call, colour)
    it.text(545, 193, "calls of one lane match;")
    it.text(545, 212, "lanes do not wait for")
    it.text(545, 231, "each other")
    return it


def tree() -> Drawing:
    """The tensors of a tree are packed, sent as one, and unpacked."""
    it = Drawing(200, "The leaves of a dict are packed into one buffer, reduced by one call, and unpacked")
    leaves = (("w", BLUE, 110), ("b", GREEN, 50), ("scale", ORANGE, 60))
    it.text(20, 35, '`{"w": ..., "b": ..., "scale": ...}`', colour=INK)
    it.text(740, 35, "the same dict", colour=INK, anchor="end")
    for x in (20, 630):
        for row, (name, colour, width) in enumerate(leaves):
            it.box(x, 50 + 38 * row, width, name, colour)
    at = 270
    for row, (name, colour, width) in enumerate(leaves):
        it.line(24 + width, 65 + 38 * row, 264, 103, arrow=True)
        it.line(496, 103, 626, 65 + 38 * row, arrow=True)
        it.box(at, 88, width, name, colour)
        at += width
    it.text(380, 76, "one buffer, one all_reduce", anchor="middle")
    it.text(20, 187, "`total = await ac.all_reduce(tree)`", colour=INK)
    it.text(740, 187, "a few large messages in place of many small ones", anchor="end")
    return it


def world_of_one() -> Drawing:
    """The same program with and without a launcher."""
    it = Drawing(200, "Without a launcher a program is a world of one; with one it is several ranks")
    it.text(20, 35, "`$ python train.py`", colour=INK)
    it.box(20, 55, 140, "rank 0 of 1", BLUE)
    it.text(20, 115, "Every collective returns what it was")
    it.text(20, 134, "given. Nothing is sent, there is no")
    it.text(20, 153, "process group, and the program")
    it.text(20, 172, "needs no change.")
    it.line(290, 20, 290, 180, dashed=True)
    it.text(320, 35, "`$ asynccoll run -n 3 train.py`", colour=INK)
    for rank in range(3):
        it.box(320 + 150 * rank, 55, 120, f"rank {rank} of 3", BLUE)
        it.line(380 + 150 * rank, 87, 380 + 150 * rank, 112, arrow=True)
    it.box(320, 114, 420, "collectives between the processes", ORANGE)
    it.text(320, 172, "torchrun, mpiexec, srun and horovodrun work as well.")
    return it


def completion() -> Drawing:
    """The three moments of a call, on the CPU and on a GPU."""
    it = Drawing(
        272, "Issued, ready and host done: ready and host done are one moment on the CPU, two on nccl"
    )
    it.text(20, 34, "on the CPU: gloo, mpi, memory", colour=INK)
    it.box(150, 48, 340, "operation in flight", ORANGE)
    it.text(150, 97, "issued")
    it.text(490, 97, "ready and host done: await returns", anchor="middle")
    it.line(20, 117, 740, 117, dashed=True)
    it.text(20, 148, "on nccl", colour=INK)
    it.text(150, 148, "issued")
    it.text(290, 148, "ready: the stream is ordered", anchor="middle")
    it.text(620, 148, "host done: the host may read", anchor="middle")
    it.text(20, 178, "host")
    it.text(20, 218, "GPU stream")
    it.box(150, 158, 70, "call", BLUE)
    it.box(220, 158, 70, "await", BLUE)
    it.box(290, 158, 130, "queues kernels", GREY)
    it.box(420, 158, 200, "await work.on_host()", BLUE)
    it.box(150, 198, 270, "operation in flight", ORANGE)
    it.box(420, 198, 200, "kernels that use the result", GREEN)
    for x in (290, 620):
        it.line(x, 151, x, 158)
    it.text(
        20, 255, "await does not wait for the GPU: what you queue after it runs once the operation is over."
    )
    return it


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "work": work,
    "lane": lane,
    "tree": tree,
    "world-of-one": world_of_one,
    "completion": completion,
}


def main(into: Path = IMAGES) -> None:
    """Draw them all."""
    for name, draw in DRAWINGS.items():
        path = into / f"{name}.svg"
        path.write_text(draw().svg())
        print(path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
