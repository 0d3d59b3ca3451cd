"""The site: pages, executed tutorials and the reference, from the docstrings."""
