"""The documentation site: pages, executed tutorials, and the API reference from docstrings."""
