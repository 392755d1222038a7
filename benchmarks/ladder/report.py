"""The table and the picture, from the JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ladder.rungs import BY_NAME, RUNGS

Row = Mapping[str, Any]
NONE = "–"

COLUMNS: dict[str, Callable[[Row], str]] = {
    "real tokens/s a GPU": lambda row: f"{row['real_tokens_per_s_per_gpu']:,.0f}",
    "times rung 1": lambda row: f"{row['times_baseline']:.2f}",
    "times the one it builds on": lambda row: f"{row['times_before']:.2f} ({row['after']})",
    "step s (least – most)": lambda row: (
        f"{row['step_s']['median']:.2f} ({row['step_s']['min']:.2f} – {row['step_s']['max']:.2f})"
    ),
    "MFU": lambda row: f"{row['mfu']:.3f}",
    "HFU": lambda row: f"{row['hfu']:.3f}",
    "fill": lambda row: f"{row['fill']:.3f}",
    "CPU calls": lambda row: f"{row['profile']['cpu']['operations']:,}",
    "CPU s": lambda row: f"{row['profile']['cpu']['total_ms'] / 1e3:.2f}",
    "GPU operations": lambda row: f"{row['profile']['gpu']['operations']:,}",
    "GPU busy s": lambda row: f"{row['profile']['gpu']['busy_ms'] / 1e3:.2f}",
    "peak GiB": lambda row: f"{row['peak_gib']['allocated']:.1f}",
    "first step s": lambda row: f"{row['first_step']['step_s']:.0f}",
    "data set h": lambda row: f"{row['hours']:.1f}",
    "“GPU utilisation” %": lambda row: f"{row['gpu']['utilisation_percent']:.0f}",
    "compiled after 3 steps": lambda row: (
        str(row["compiles"]["after"]["compiled"] + row["compiles"]["after"]["graphs"])
        if row["steps"]
        else NONE
    ),
    "loss of the probe": lambda row: f"{row['probe_loss']:.4f}",
}


def line(row: Row) -> str:
    """A row for people who watch."""
    if "step_s" not in row:
        return row.get("problem", "no timed step")
    shown = [
        f"{name} {cell(row)}"
        for name, cell in COLUMNS.items()
        if name in ("real tokens/s a GPU", "MFU", "peak GiB", "step s (least – most)")
        and _text(cell, row) != NONE
    ]
    return ", ".join([*shown, f"{row['steps']} steps", *filter(None, [row.get("problem")])])


def write(path: Path) -> None:
    """Writes NAME.md and NAME.png beside NAME.json."""
    record = json.loads(path.read_text("utf-8"))
    results = record["results"]
    rows = [(rung.name, results["rungs"][rung.name]) for rung in RUNGS if rung.name in results["rungs"]]
    rows = [(name, _compared(name, row, dict(rows))) for name, row in rows]
    head = ["rung", "", *COLUMNS]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, row in rows:
        cells = [_text(cell, row) for cell in COLUMNS.values()]
        lines.append(f"| {name} | {row['title']} | {' | '.join(cells)} |")
    text = [
        f"# {path.stem}",
        f"{results['machine']}; commit {record['commit']}, {record['date']}. {_of(results['lengths'])}",
        "\n".join(lines),
        _own(rows),
        _anchors(results),
        *(_dearest(name, row) for name, row in rows if "profile" in row),
    ]
    path.with_suffix(".md").write_text("\n\n".join(filter(None, text)) + "\n", "utf-8")
    _picture(path.with_suffix(".png"), rows, title=f"{path.stem}: {results['machine']}")
    print(f"wrote {path.with_suffix('.md')} and its picture")


def _compared(name: str, row: Row, rows: Mapping[str, Row]) -> dict[str, Any]:
    """The row with its speed over rung 1's, and over that of the rung it builds on, where these are there."""
    found, after = dict(row), BY_NAME[name].after
    for key, other in (("times_baseline", "1"), ("times_before", after)):
        if other in rows and "step_s" in row and "step_s" in rows[other]:
            found[key] = row["real_tokens_per_s_per_gpu"] / rows[other]["real_tokens_per_s_per_gpu"]
    return found | {"after": after}


def _text(cell: Callable[[Row], str], row: Row) -> str:
    try:
        return cell(row)
    except KeyError:  # the rung did not come to it, or this machine has none
        return NONE


def _of(lengths: Mapping[str, Any]) -> str:
    return (
        f"Lengths: {lengths['source']}, mean {lengths['mean']:.0f} tokens; the data set is "
        f"{lengths['conversations']:,} conversations of them."
    )


def _own(rows: list[tuple[str, dict[str, Any]]]) -> str:
    """What was set by hand."""
    return "  \n".join(
        f"Rung {name} with {', '.join(f'{key} = {value}' for key, value in row['own'].items())}."
        for name, row in rows
        if row["own"]
    )


def _anchors(results: Mapping[str, Any]) -> str:
    found = [f"{anchor['step_s']['median']:.3f} s" for anchor in results["anchors"]]
    return f"Rung 3, repeated in every piece: {', '.join(found)}." if found else ""


def _dearest(name: str, row: Row) -> str:
    """The published tables' form: calls, mean and total of the ten dearest operations."""
    parts = [f"## Rung {name}: {row['title']}"]
    for device, label in (("cpu", "CPU"), ("gpu", "GPU")):
        if device not in row["profile"]:
            continue
        found = row["profile"][device]
        lines = [
            f"{label}: {found['operations']:,} calls, {found['total_ms'] / 1e3:.2f} s in one step",
            "",
            "| dearest | calls | mean µs | total ms |",
            "|---|---|---|---|",
            *(
                f"| `{entry['name'][:90].replace('|', '/')}` | {entry['calls']:,} | {entry['mean_us']:,.1f} "
                f"| {entry['total_ms']:,.1f} |"
                for entry in found["top"]
            ),
        ]
        if "by_kind_ms" in found:
            kinds = ", ".join(f"{kind} {ms / 1e3:.2f}" for kind, ms in found["by_kind_ms"].items())
            lines += [
                "",
                f"Seconds by kind: {kinds}. "
                f"Communication alone {found['exposed_communication_ms'] / 1e3:.2f}, "
                f"nothing {(found['span_ms'] - found['busy_ms']) / 1e3:.2f}.",
            ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _picture(path: Path, rows: list[tuple[str, dict[str, Any]]], *, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(name, row) for name, row in rows if "real_tokens_per_s_per_gpu" in row][::-1]
    if not shown:
        return
    figure, axis = pyplot.subplots(figsize=(8, 0.6 + 0.36 * len(shown)), layout="constrained")
    speeds = [row["real_tokens_per_s_per_gpu"] for _, row in shown]
    labels = [f"{name}  {row['title']}" for name, row in shown]
    colours = [
        "#b0b0b0" if row["kind"] == "padded" else "#d08a3c" if row["kind"] == "peer" else "#3c78b4"
        for _, row in shown
    ]
    bars = axis.barh(labels, speeds, color=colours)
    notes = [
        f"{speed:,.0f}"
        + (f"  {row['times_baseline']:.1f}×" if "times_baseline" in row else "")
        + (f"  MFU {row['mfu']:.2f}" if "mfu" in row else "")
        for speed, (_, row) in zip(speeds, shown, strict=True)
    ]
    axis.bar_label(bars, notes, padding=3, fontsize=8)
    axis.set_xlim(0, 1.25 * max(speeds))
    axis.set_xlabel("real tokens a second and GPU")
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
