"""How the documentation is built: `make docs`, any warning is an error."""

import autoshard


project = "autoshard"
version = release = autoshard.__version__
copyright = "the authors of autoshard"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = f"autoshard {version}"
html_copy_source = False

myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # console blocks hold patterns such as *.up that no shell would take

default_role = "code"  # docstrings write `name` for code, as the pages do
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
add_module_names = False
python_maximum_signature_line_length = 88
