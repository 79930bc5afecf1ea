"""A report as one self-contained HTML page: no script, nothing fetched, light and dark, printable. Text is escaped.

A page is a value: tiles, sections, figures and tables. `gateway.reports.fairness` and `gateway.reports.comparison`
make them from numbers; here they become markup.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class Cell:
    """Text of a table, with a tone (`good`, `bad`, `quiet`) and how dark its background is, 0..1."""

    text: str
    tone: str = ""
    heat: float = 0.0
    is_text: bool = False  # left-aligned; numbers stand right


@dataclass(frozen=True, slots=True)
class Table:
    """Column names with their units, and rows of cells or plain strings. The first column heads its row."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    num_text: int = 1  # leading columns of text
    note: str = ""
    is_matrix: bool = False

    @property
    def cells(self) -> list[list[Cell]]:
        """Every cell as a Cell."""
        return [
            [
                cell if isinstance(cell, Cell) else Cell(cell, is_text=place < self.num_text)
                for place, cell in enumerate(row)
            ]
            for row in self.rows
        ]

    @property
    def text_columns(self) -> set[int]:
        """The columns whose cells are text, so that the header stands over them."""
        texts = [place for place, cell in enumerate(self.cells[0]) if cell.is_text] if self.rows else []
        return {*range(self.num_text), *texts}


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing (`gateway.reports.svg`, whose text is escaped there), what to see in it, and its numbers as a CSV
    link.
    """

    title: str
    drawing: str
    caption: str
    legend: str = ""
    unit: str = ""
    csv_name: str = ""
    csv_href: str = ""
    is_wide: bool = False

    @property
    def markup(self) -> Any:
        """The drawing as markup."""
        return _markup(self.drawing)

    @property
    def legend_markup(self) -> Any:
        """The legend as markup."""
        return _markup(self.legend)


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with a sentence, its figures and its tables."""

    anchor: str
    title: str
    lead: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    panels: Sequence[Figure] = ()  # small figures of one kind, with one caption for all
    panels_caption: str = ""
    quote: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline number."""

    name: str
    value: str
    note: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """The whole document."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    warnings: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = field(default_factory=tuple)
    footer: Sequence[str] = ()


def render_page(page: Page) -> str:
    """The document as text."""
    from jinja2 import Environment, StrictUndefined

    template = (files("gateway.reports") / "report.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(page=page)


def csv_href(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A `data:` link to these rows as CSV."""
    from gateway.reports.csv_export import write_csv

    text = io.StringIO()
    write_csv(text, columns, [dict(zip(columns, row, strict=True)) for row in rows])
    return "data:text/csv;charset=utf-8," + quote(text.getvalue())


def _markup(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)
