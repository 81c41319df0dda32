"""The demo's two timelines as a picture, for where no browser is: a README, a slide, a terminal that shows images.

The one idea: everything is drawn at twice its size and scaled down, which smooths edges and hatching alike.
"""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ragtag.cli.demo_result import DemoResult, DemoTraining
from ragtag.cli.demo_timeline import KINDS, Kind, Timeline

_SCALE = 2
_WIDTH = 1600
_MARGIN = 56
_LANES_LEFT, _LANES_RIGHT = 260, 1270
_LANE, _LANE_GAP = 54, 14
_HEAD = 172
"""Height above the first panel."""
_PANEL_HEAD = 76
_FOOT = 96

_TEXT, _QUIET, _PAGE, _PANEL = "#16202e", "#5c6778", "#ffffff", "#f3f5f8"
_RED = "#c2452f"
_COLORS: dict[Kind, str] = {"busy": "#1f6fd6", "communicating": "#f2a900", "waiting": "#fbe3df"}
_HATCH = "#ee9d8f"


def write_png(path: Path, result: DemoResult, shown: tuple[Timeline, Timeline]) -> None:
    """Draw both timelines, DDP's first, on one axis of seconds."""
    panel = _PANEL_HEAD + len(result.devices) * (_LANE + _LANE_GAP) + 12
    sheet = _Sheet(_WIDTH, _HEAD + 2 * panel + 24 + _FOOT)
    speeds = ", ".join(f"{device.speed:g}" for device in result.devices)
    sheet.text(_MARGIN, 44, f"One training on {len(result.devices)} unequal devices, twice", size=44)
    sheet.text(
        _MARGIN,
        104,
        f"Byte-level GPT, {result.global_batch_size} samples a step; devices of speeds {speeds}; "
        f"the last {shown[0].duration_s:.1f} s of both",
        size=25,
        color=_QUIET,
    )
    ddp, ours = result.ddp, result.ragtag
    of_ddp = f"{ddp.samples_per_s:.1f} samples/s: {100 * ddp.eta:.0f} % of their summed speed"
    of_ours = f"{ours.samples_per_s:.1f} samples/s: {100 * ours.eta:.0f} %, {result.speed_up:.2f} times as fast"
    _draw_panel(sheet, _HEAD, panel, "Stock DDP, equal batches", of_ddp, _RED, result, ddp, shown[0])
    top = _HEAD + panel + 24
    _draw_panel(sheet, top, panel, "ragtag", of_ours, _COLORS["busy"], result, ours, shown[1])
    _draw_foot(sheet, top + panel + 14, result, shown[0])
    sheet.save(path)


class _Sheet:
    """A drawing in units of the finished picture's pixels."""

    def __init__(self, width: int, height: int) -> None:
        self._size = width, height
        self._image = Image.new("RGB", (width * _SCALE, height * _SCALE), _PAGE)
        self._draw = ImageDraw.Draw(self._image)

    def text(self, x: float, y: float, words: str, *, size: int, color: str = _TEXT, anchor: str = "la") -> float:
        """Write, and return where the words end on the right."""
        font = ImageFont.load_default(size * _SCALE)
        self._draw.text((x * _SCALE, y * _SCALE), words, fill=color, font=font, anchor=anchor)
        return self._draw.textbbox((x * _SCALE, y * _SCALE), words, font=font, anchor=anchor)[2] / _SCALE

    def box(self, left: float, top: float, right: float, bottom: float, color: str, *, radius: float = 0) -> None:
        corners = [left * _SCALE, top * _SCALE, max(left, right) * _SCALE - 1, bottom * _SCALE - 1]
        if corners[2] >= corners[0]:
            self._draw.rounded_rectangle(corners, radius=radius * _SCALE, fill=color)

    def hatched(self, left: float, top: float, right: float, bottom: float) -> None:
        """A box with diagonal stripes, told from the others without colour too."""
        width, height = round((right - left) * _SCALE), round((bottom - top) * _SCALE)
        if width < 1:
            return
        piece = Image.new("RGB", (width, height), _COLORS["waiting"])
        draw = ImageDraw.Draw(piece)
        for start in range(-height, width, 9 * _SCALE):
            draw.line((start, height, start + height, 0), fill=_HATCH, width=2 * _SCALE)
        self._image.paste(piece, (round(left * _SCALE), round(top * _SCALE)))

    def save(self, path: Path) -> None:
        self._image.resize(self._size, Image.Resampling.LANCZOS).save(path, optimize=True)


def _draw_panel(
    sheet: _Sheet,
    top: int,
    height: int,
    title: str,
    figures: str,
    color: str,
    result: DemoResult,
    training: DemoTraining,
    shown: Timeline,
) -> None:
    sheet.box(_MARGIN - 26, top, _WIDTH - _MARGIN + 26, top + height, _PANEL, radius=14)
    sheet.text(_MARGIN, top + 20, title, size=32)
    sheet.text(_WIDTH - _MARGIN, top + 22, figures, size=29, color=color, anchor="ra")
    per_s = (_LANES_RIGHT - _LANES_LEFT) / shown.duration_s
    for rank, device in enumerate(result.devices):
        lane = top + _PANEL_HEAD + rank * (_LANE + _LANE_GAP)
        bottom, middle = lane + _LANE, lane + _LANE / 2
        sheet.text(_MARGIN, middle - 2, device.name, size=26, anchor="ls")
        sheet.text(_MARGIN, middle + 23, f"speed {device.speed:g}", size=20, color=_QUIET, anchor="ls")
        for span in shown.spans:
            if span.device == rank:
                left, right = _LANES_LEFT + span.start_s * per_s, _LANES_LEFT + span.stop_s * per_s
                _draw_span(sheet, span.kind, left, lane, right, bottom)
        for end_s in shown.ends_s[:-1]:
            sheet.box(_LANES_LEFT + end_s * per_s, lane, _LANES_LEFT + end_s * per_s + 2, bottom, _PANEL)
        waiting = training.wait_part(rank)
        sheet.text(_LANES_RIGHT + 22, middle - 2, f"waits {100 * waiting:.0f} %", size=26, anchor="ls",
                   color=_RED if waiting > 0.1 else _TEXT)  # fmt: skip
        share = f"{training.shares[rank]:.3g} of {result.global_batch_size} samples"
        sheet.text(_LANES_RIGHT + 22, middle + 23, share, size=20, color=_QUIET, anchor="ls")


def _draw_span(sheet: _Sheet, kind: Kind, left: float, top: float, right: float, bottom: float) -> None:
    if kind == "waiting":
        sheet.hatched(left, top, right, bottom)
    else:
        sheet.box(left, top, right, bottom, _COLORS[kind])


def _draw_foot(sheet: _Sheet, top: float, result: DemoResult, shown: Timeline) -> None:
    x, middle = float(_LANES_LEFT), top + 24
    for kind in KINDS:
        _draw_span(sheet, kind, x, middle - 10, x + 34, middle + 10)
        x = sheet.text(x + 46, middle, kind, size=22, color=_QUIET, anchor="lm") + 44
    scale = f"{shown.duration_s:.1f} seconds; light lines end steps"
    sheet.text(_LANES_RIGHT, middle, scale, size=22, color=_QUIET, anchor="rm")
    if not result.honest:
        warning = "This machine was too busy to keep the devices' pace: run the demo again while nothing else runs."
        sheet.text(_LANES_LEFT, middle + 38, warning, size=22, color=_RED, anchor="lm")
