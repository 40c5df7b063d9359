"""The Python assignment: cells of its solution, with the outputs that a kernel gives."""

from typing import Any

from grader.synthetic.cells import code, printed, result, text
from grader.synthetic.sales import SalesData

Cells = dict[str, dict[str, Any]]

LOAD = """\
import csv
with open("sales.csv") as file:
    rows = list(csv.DictReader(file))
print("Rows:", len(rows))"""
TOTAL = """\
def revenue(row):
    return int(row["units"]) * float(row["price"])

total_revenue = round(sum(revenue(row) for row in rows), 2)
print("Total revenue:", total_revenue)"""
REGIONS = """\
from IPython.display import HTML, display
by_region = {}
for row in rows:
    by_region[row["region"]] = by_region.get(row["region"], 0) + revenue(row)
lines = "".join(f"<tr><td>{name}</td><td>{value:.2f}</td></tr>" for name, value in sorted(by_region.items()))
display(HTML("<table><thead><tr><th>region</th><th>revenue</th></tr></thead><tbody>" + lines + "</tbody></table>"))"""
AVERAGE = """\
avg_order = round(total_revenue / len(rows), 2)
avg_order"""


def region_table(by_region: dict[str, float]) -> dict[str, Any]:
    lines = "".join(f"<tr><td>{name}</td><td>{value:.2f}</td></tr>" for name, value in sorted(by_region.items()))
    head = "<table><thead><tr><th>region</th><th>revenue</th></tr></thead><tbody>"
    html = f"{head}{lines}</tbody></table>"
    data = {"text/html": html, "text/plain": "<IPython.core.display.HTML object>"}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def python_answers(sales: SalesData) -> Cells:
    """By name, in order."""
    return {
        "title": text("# Sales analysis"),
        "load_heading": text("## 1. Load data"),
        "load": code(LOAD, printed(f"Rows: {len(sales.sales)}\n"), tags=("load",)),
        "total_heading": text("## 2. Total revenue"),
        "total": code(TOTAL, printed(f"Total revenue: {sales.total}\n"), tags=("total",)),
        "regions_heading": text("## 3. Revenue by region"),
        "regions": code(REGIONS, region_table(sales.by_region), tags=("regions",)),
        "average_heading": text("## 4. Average order"),
        "average": code(AVERAGE, result(str(sales.average))),
        "reflection_heading": text("## 5. Reflection"),
    }
