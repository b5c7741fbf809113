"""What the charts are made of: lines, axes, coloured tables, in the words of ECharts."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from semidfl.web.look import FONT, Look

__all__ = ["axis", "curve", "heat", "limit", "plot"]

Options = dict[str, Any]


def curve(
    name: str, rounds: Sequence[int], values: Any, colour: str, width: float, quiet: bool, z: int = 2
) -> dict[str, Any]:
    data = [[t, round(float(y), 2) if np.isfinite(y) else None] for t, y in zip(rounds, values, strict=True)]
    line: dict[str, Any] = {
        "name": name,
        "type": "line",
        "data": data,
        "showSymbol": len(data) == 1,  # a single test would show nothing
        "symbol": "circle",
        "symbolSize": 6,
        "z": z,
        "lineStyle": {"width": width, "opacity": 1 if z > 2 or not quiet else 0.45, "color": colour},
        "itemStyle": {"color": colour},
        "emphasis": {"disabled": quiet},
    }
    return line | ({"tooltip": {"show": False}, "silent": True} if quiet else {})


def plot(
    look: Look,
    x: str,
    y: str,
    rounds: int,
    series: list[dict[str, Any]],
    low: float | None = None,
    high: float | None = None,
) -> Options:
    """Lines over the rounds, with room for the names of the axes at any width."""
    return {
        "animation": False,
        "textStyle": {"fontFamily": FONT},
        "grid": {"left": 10, "right": 18, "top": 34, "bottom": 30, "containLabel": True},
        "tooltip": {
            "trigger": "axis",
            "confine": True,
            "order": "valueDesc",
            "backgroundColor": look.card,
            "borderColor": look.line,
            "textStyle": {"color": look.ink, "fontSize": 12},
        },
        "xAxis": axis(look, x, type="value", min=0, max=max(1, rounds), minInterval=1),
        "yAxis": axis(look, "", upright=True, type="value", min=low, max=high),
        # As a title: the name of the axis itself would be cut off where the numbers beside it are short.
        "title": {
            "text": y,
            "left": 4,
            "top": 2,
            "textStyle": {"color": look.faint, "fontSize": 12, "fontWeight": 400},
        },
        "series": series,
    }


def axis(look: Look, name: str, upright: bool = False, **more: Any) -> dict[str, Any]:
    """A quiet axis, with its name below."""
    return {
        "name": name,
        "nameLocation": "middle",
        "nameGap": 28,
        "nameTextStyle": {"color": look.faint, "fontSize": 12},
        "axisLabel": {"color": look.faint, "hideOverlap": True},
        "axisLine": {"show": not upright, "lineStyle": {"color": look.line}},
        "axisTick": {"show": False},
        "splitLine": {"show": upright, "lineStyle": {"color": look.line}},
        **more,
    }


def limit(look: Look, y: float, text: str) -> dict[str, Any]:
    return {
        "symbol": "none",
        "silent": True,
        "lineStyle": {"color": look.faint, "type": "dashed"},
        "label": {"formatter": text, "position": "insideEndTop", "color": look.faint},
        "data": [{"yAxis": y}] if y else [],  # said even if there is none: ECharts keeps what is not said anew
    }


def heat(
    look: Look, cells: list[Any], x: tuple[str, list[Any]], y: tuple[str, list[str]], unit: str, most: float
) -> Options:
    """A coloured table, its scale above."""
    options = plot(look, x[0], y[0], 0, [{"name": unit, "type": "heatmap", "data": cells, "progressive": 0}])
    options["grid"] |= {"top": 58}
    options["title"]["top"] = 34
    options["xAxis"] = axis(look, x[0], type="category", data=x[1])
    options["yAxis"] = axis(look, "", upright=True, type="category", data=y[1])
    for side in ("xAxis", "yAxis"):
        options[side]["splitLine"] = {"show": False}
    options["series"][0]["itemStyle"] = {"borderColor": look.card, "borderWidth": 1 if len(x[1]) <= 40 else 0}
    told = "p => {} + {}[p.value[0]] + {} + {}[p.value[1]] + {} + p.value[2]".format(
        *(json.dumps(part) for part in (f"{x[0].split()[0]} ", x[1], f"\n{y[0]} ", y[1], f"\n{unit} "))
    )
    # As plain text: a class may have any name, and none is to be read as HTML.
    options["tooltip"] |= {"trigger": "item", "renderMode": "richText", ":formatter": told}
    options["visualMap"] = {
        "min": 0,
        "max": most,
        "precision": 0 if most > 1 else 2,
        "calculable": False,
        "orient": "horizontal",
        "right": 10,
        "top": 0,
        "itemWidth": 10,
        "itemHeight": 110,
        "text": [f"{most:g} {unit}", "0"],
        "textStyle": {"color": look.faint},
        "inRange": {"color": list(look.ramp)},
    }
    return options
