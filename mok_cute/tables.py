"""What commands found, as tables for people. Reads the same objects that ``--json`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Json = dict[str, Any]


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{key} {cell(item)}" for key, item in value.items()) or "-"
    return str(value)


def show_sections(console: Console, sections: dict[str, Any]) -> None:
    """Each section as a table: a list of rows with their columns, or one object as name and value."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    for title, section in sections.items():
        rows = section if isinstance(section, list) else [{"name": k, "value": v} for k, v in section.items()]
        name = title.replace("_", " ") if title.isidentifier() else title
        table = Table(title=name, title_justify="left", box=box.SIMPLE)
        columns = list(rows[0]) if rows else []
        for column in columns:
            number = all(isinstance(row[column], (int, float)) and not isinstance(row[column], bool) for row in rows)
            table.add_column(column.replace("_", " "), justify="right" if number else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell(row[column])) for column in columns))
        console.print(table)


def show_check(console: Console, document: Json) -> None:
    results = [{"result": name, **values} for name, values in document["results"].items()]
    shown = ("result", "max_abs", "rel_l1", "error_vs_torch_bf16", "limit", "ok")
    config = document["config"]
    summary = {
        "shape": config["shape"]["name"],
        "experts": config["shape"]["num_experts"],
        "ranks": config["ranks"],
        "tokens": config["tokens"],
        "routing": config["routing"],
        "device": config["device_name"],
        "deterministic": document["deterministic"],
        "schedule exact": document["schedule_exact"],
        "launches": document["launches"],
        "seconds": document["wall_seconds"],
    }
    sections = {"check": summary, "results": [{key: row.get(key) for key in shown} for row in results]}
    show_sections(console, sections)
    for finding in document["findings"]:
        console.print(f"  {finding}", style="red", markup=False)
    console.print("ok" if document["ok"] else "WRONG", style="bold green" if document["ok"] else "bold red")


def show_compile(console: Console, document: Json) -> None:
    instructions = document.get("instructions", {})
    left_out = ("ok", "instructions", "shape")
    figures = {key: value for key, value in document.items() if key not in left_out}
    show_sections(
        console,
        {
            f"compiled: {document['shape']['name']}, forward, {document['arch']}": figures,
            "instructions": [{"opcode": name, "count": count} for name, count in instructions.items()],
        },
    )


def show_doctor(console: Console, report: Json) -> None:
    show_sections(console, {name: report[name] for name in report if name not in ("ok", "findings")})
    for finding in report["findings"]:
        console.print(f"! {finding}", style="yellow", markup=False)
    if not report["findings"]:
        console.print("no findings", style="green")
