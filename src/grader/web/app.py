"""The script that Streamlit runs for every click: navigation, then one page."""

import streamlit as st

from disaggregated_inference.struct_types import build_struct_types
from grader.web.assignments_page import assignments_page
from grader.web.cluster_page import cluster_page
from grader.web.export_page import export_page
from grader.web.results_page import results_page
from grader.web.review_page import review_page
from grader.web.statistics_page import statistics_page
from grader.web.submissions_page import submissions_page

_PAGES = {
    "Assignments": assignments_page,
    "Submissions": submissions_page,
    "Results": results_page,
    "Review": review_page,
    "Statistics": statistics_page,
    "Cluster": cluster_page,
    "Export": export_page,
}
# Streamlit leaves much room around everything: at 1024 pixels too little would be left for a table.
_STYLE = """<style>
section[data-testid=stSidebar]{width:13rem!important;min-width:13rem!important}
[data-testid=stSidebarHeader]{height:2.5rem}
.stMainBlockContainer{padding:2.5rem 2rem 3rem}
h1{font-size:1.9rem!important;padding:.25rem 0!important}h2{font-size:1.45rem!important}h3{font-size:1.2rem!important}
[data-testid=stMetricValue]{font-size:1.6rem}.stButton button,.stFormSubmitButton button{padding:.25rem .6rem}
</style>"""


def main() -> None:
    build_struct_types()
    st.set_page_config(page_title="Grade book", layout="wide")
    st.html(_STYLE)
    pages = [
        st.Page(page, title=title, url_path=title.lower(), default=title == "Assignments")
        for title, page in _PAGES.items()
    ]
    chosen = st.navigation(pages)
    st.title(chosen.title)
    chosen.run()
    st.sidebar.html('<a href="/logout" target="_self">Log out</a>')


main()
