"""The R assignment: cells of its solution, with the outputs that IRkernel gives."""

from typing import Any

from grader.synthetic.cells import code, printed, result, text
from grader.synthetic.sales import SalesData

Cells = dict[str, dict[str, Any]]

LOAD = """\
rows <- read.csv("sales.csv")
cat("Rows:", nrow(rows), "\\n")"""
TOTAL = """\
revenue <- function(data) {
  data$units * data$price
}
total_revenue <- round(sum(revenue(rows)), 2)
cat("Total revenue:", total_revenue, "\\n")"""
REGIONS = """\
rows$revenue <- revenue(rows)
by_region <- aggregate(revenue ~ region, data = rows, FUN = sum)
by_region"""
AVERAGE = """\
avg_order <- round(total_revenue / nrow(rows), 2)
avg_order"""


def region_frame(by_region: dict[str, float]) -> dict[str, Any]:
    lines = "".join(f"<tr><td>{name}</td><td>{value:.2f}</td></tr>" for name, value in sorted(by_region.items()))
    html = (
        '<table class="dataframe"><caption>A data.frame: 4 x 2</caption><thead>'
        "<tr><th scope=col>region</th><th scope=col>revenue</th></tr>"
        "<tr><th scope=col>&lt;chr&gt;</th><th scope=col>&lt;dbl&gt;</th></tr>"
        f"</thead><tbody>{lines}</tbody></table>"
    )
    plain = "\n".join(["  region revenue", *(f"{name} {value:.2f}" for name, value in sorted(by_region.items()))])
    return {"output_type": "display_data", "data": {"text/html": html, "text/plain": plain}, "metadata": {}}


def r_answers(sales: SalesData) -> Cells:
    """By name, in order."""
    average = {"output_type": "display_data", "data": result(f"[1] {sales.average}")["data"], "metadata": {}}
    return {
        "title": text("# Sales analysis"),
        "load_heading": text("## 1. Load data"),
        "load": code(LOAD, printed(f"Rows: {len(sales.sales)} \n"), tags=("load",)),
        "total_heading": text("## 2. Total revenue"),
        "total": code(TOTAL, printed(f"Total revenue: {sales.total} \n"), tags=("total",)),
        "regions_heading": text("## 3. Revenue by region"),
        "regions": code(REGIONS, region_frame(sales.by_region), tags=("regions",)),
        "average_heading": text("## 4. Average order"),
        "average": code(AVERAGE, average),
        "reflection_heading": text("## 5. Reflection"),
    }
