"""Sphinx's configuration: ``sphinx-build -W --keep-going -n -c docs . build/site``, in the root.

The source folder is the repository's root, so that links between pages work on the site as they do
in the repository. Pages load nothing from other sites: formulas become MathML here.
"""

from __future__ import annotations

import inspect
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from pydantic import BaseModel
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger
from sphinx.util.nodes import make_refnode

import batchwright as bw

project = "Batchwright"
copyright = "The Batchwright maintainers"  # noqa: A001 - Sphinx calls it so
version = release = bw.__version__

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**"]
exclude_patterns = [
    ".*",
    "docs/site",
    "src",
    "tests",
    "benchmarks",
    "build",
    "dist",
    "venv",
    "runs",
]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = False
myst_heading_anchors = 3
nb_execution_mode = "off"  # docs/pictures.py runs it, and a test does

default_role = "literal"  # docstrings have single backticks
autodoc_member_order = "bysource"
napoleon_use_ivar = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
# Only our own public names must be found as links; other names of Python have no page here.
nitpick_ignore_regex = [(r"py:.*", r"(?!batchwright\.\w+$).*")]

html_theme = "furo"
html_title = f"{project} {version}"
html_static_path = ["site/static"]
html_css_files = ["batchwright.css"]
html_extra_path = ["site/index.html"]
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "friendly", "github-dark"


def hide_signature(app: Sphinx, what: str, name: str, obj: Any, *rest: Any) -> Any:
    """Hide the signature of a record, whose fields are listed below it."""
    del app, what, name, rest
    return ("", None) if _is_record(obj) else None


def list_fields(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Add a record's fields with their meanings; a job's fields have a page of their own."""
    del app, what, name, options
    if _is_record(obj) and obj is not bw.Job:
        lines += ["", ".. rubric:: Fields", ""]
        for field, about in obj.model_fields.items():
            words = " ".join((about.description or "").split())
            lines.append(f"* ``{field}``" + (f": {words}" if words else ""))
        lines.append("")


def _is_record(obj: Any) -> bool:
    return inspect.isclass(obj) and issubclass(obj, BaseModel)


def find_public(app: Sphinx, env: Any, node: Any, contnode: Any) -> Any:
    """Link a name to where it is public: ``batchwright.records.plan.Plan`` is `bw.Plan`."""
    short = node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") != "py" or short not in bw.__all__:
        return None
    found = env.domains["py"].objects.get(f"batchwright.{short}")
    if found is None:
        return None
    return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, contnode)


def mark_long_code(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Mark long code in tables, which may be broken into lines; short names may not."""
    del app, name
    for cell in doctree.findall(nodes.entry):
        for code in cell.findall(nodes.literal):
            if len(code.astext()) > 30:
                code["classes"].append("long")


def visit_inline(self: Any, node: nodes.math) -> None:
    """Write a formula in a line."""
    self.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def visit_block(self: Any, node: nodes.math_block) -> None:
    """Write a formula on lines of its own."""
    self.body.append(f'<div class="math">{_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def _mathml(node: nodes.Element, *, as_block: bool) -> str:
    try:
        return tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        getLogger(__name__).warning("formula %r: %s", node.astext(), error, location=node)
        return ""


def setup(app: Sphinx) -> None:
    """Connect the functions above; Sphinx calls this."""
    app.connect("autodoc-process-signature", hide_signature)
    app.connect("autodoc-process-docstring", list_fields)
    app.connect("missing-reference", find_public)
    app.connect("doctree-resolved", mark_long_code)
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
