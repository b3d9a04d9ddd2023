"""A flow drawn as SVG: one box for each stage with its fused operators, an arrow for each exchange.

This module needs no drawing library: a flow is a small layered graph whose boxes are lists of text. The file opens
anywhere, and its text can be searched.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from penstock.ids import StageId
from penstock.operators.base import visible
from penstock.plan import Edge, Plan, Stage, columns_text

_CHAR = 6.7
"""Width of a character of the small monospaced text, in pixels."""
_LINE, _PAD, _GAP_X, _GAP_Y, _MARGIN = 17, 12, 110, 28, 20
_TEXT_MAX = 58
_STYLE = """
    text { font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #1f2937 }
    .title { font-weight: bold; font-size: 12px } .soft { fill: #6b7280 } .sink { fill: #047857 }
    .box { fill: #fff; stroke: #94a3b8 } .source { stroke: #0369a1 } .keyed { stroke: #7c3aed; stroke-width: 1.6 }
    .wire { fill: none; stroke: #64748b; stroke-width: 1.4 } .ground { fill: #f8fafc }
"""


@dataclass(frozen=True)
class _Box:
    stage: Stage
    lines: tuple[tuple[str, str], ...]
    """(CSS class, text) of each line."""

    @property
    def width(self) -> float:
        return max(len(text) for _, text in self.lines) * _CHAR * 1.06 + 2 * _PAD

    @property
    def height(self) -> float:
        return len(self.lines) * _LINE + 2 * _PAD


def draw(plan: Plan) -> str:
    """The plan as an SVG document."""
    boxes = {s.id: _box(s) for s in plan.stages}
    depth: dict[str, int] = {}
    for stage in plan.stages:
        depth[stage.id] = max((depth[e.upstream] + 1 for e in stage.ins), default=0)
    columns: list[list[_Box]] = [[] for _ in range(max(depth.values()) + 1)]
    for stage in plan.stages:
        columns[depth[stage.id]].append(boxes[stage.id])
    heights = [sum(b.height for b in column) + _GAP_Y * (len(column) - 1) for column in columns]
    total = max(heights)
    at: dict[str, tuple[float, float]] = {}
    x = float(_MARGIN)
    for column, height in zip(columns, heights, strict=True):
        y = 2 * _MARGIN + (total - height) / 2
        for box in column:
            at[box.stage.id] = (x, y)
            y += box.height + _GAP_Y
        x += max(b.width for b in column) + _GAP_X
    width, height = x - _GAP_X + _MARGIN, total + 3 * _MARGIN
    parts = [_wire(plan, e, boxes, at) for s in plan.stages for e in s.outs]
    parts += [_drawn(boxes[s.id], *at[s.id]) for s in plan.stages]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="flow {escape(plan.graph.name)}">',
            f"  <style>{_STYLE}  </style>",
            '  <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#64748b"/></marker></defs>',
            f'  <rect class="ground" width="{width:.0f}" height="{height:.0f}" rx="8"/>',
            f'  <text class="title" x="{_MARGIN}" y="{_MARGIN + 4}">flow {escape(plan.graph.name)}</text>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _box(stage: Stage) -> _Box:
    if stage.keyed is not None:
        title = f"stage {stage.index} · by {', '.join(visible(stage.keyed.key)) or 'nothing'}"
        if stage.root.partition is not None:
            title += f" · {stage.root.uid}"
    else:
        title = f"stage {stage.index} · source"
    lines = [("title", title)]
    for node in (stage.root, *stage.steps):
        lines.append(("", _cut(f"{node.id}: {node.describe()}")))
        lines.append(("soft", _cut(f"  {columns_text(node.schema)}")))
    lines += [("sink", _cut(f"→ {node.id}: {node.describe()}")) for node in stage.sinks]
    return _Box(stage, tuple(lines))


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 1] + "…"


def _drawn(box: _Box, x: float, y: float) -> str:
    kind = "source" if box.stage.source is not None else "keyed"
    out = [f'  <rect class="box {kind}" x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height}" rx="6"/>']
    for i, (style, text) in enumerate(box.lines):
        place = f'x="{x + _PAD:.1f}" y="{y + _PAD + (i + 0.75) * _LINE:.1f}"'
        out.append(f'  <text class="{style}" xml:space="preserve" {place}>{escape(text)}</text>')
    return "\n".join(out)


def _wire(plan: Plan, edge: Edge, boxes: dict[StageId, _Box], at: dict[str, tuple[float, float]]) -> str:
    """An arrow from the right of one box to the left of another. The inputs of a join arrive one below the other."""
    start, end = boxes[edge.upstream], boxes[edge.downstream]
    ins = plan.by_id[edge.downstream].ins
    outs = plan.by_id[edge.upstream].outs
    x0, y0 = at[edge.upstream][0] + start.width, at[edge.upstream][1] + _share(start, outs.index(edge), len(outs))
    x1, y1 = at[edge.downstream][0], at[edge.downstream][1] + _share(end, ins.index(edge), len(ins))
    bend = max(40.0, (x1 - x0) / 2)
    path = f"M{x0:.1f} {y0:.1f} C{x0 + bend:.1f} {y0:.1f} {x1 - bend:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    label = edge.node if len(plan.by_id[edge.downstream].root.inputs) == 1 else f"{edge.node} ({edge.port + 1})"
    tip = label if len(label) <= 14 else label[:13] + "…"
    where = f'x="{x1 - 10:.1f}" y="{y1 - 5:.1f}"'
    return (
        f'  <path class="wire" d="{path}" marker-end="url(#tip)"/>\n'
        f'  <text class="soft" text-anchor="end" {where}>{escape(tip)}</text>'
    )


def _share(box: _Box, index: int, count: int) -> float:
    return box.height * (index + 1) / (count + 1)
