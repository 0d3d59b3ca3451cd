"""Source code that a tutorial shows: of a class of the repository, as it is now."""

import inspect

from IPython.display import Markdown

from ddplab.conformance.class_under_test import Subject


def show(name: str) -> Markdown:
    """The source of the class or function `module:name`, as highlighted code below the cell."""
    code = inspect.getsource(Subject(name).make)
    return Markdown(f"```python\n{code}```")  # type: ignore[no-untyped-call]
