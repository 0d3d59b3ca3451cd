"""Runs the tests of `ddplab.test_conformance` by pytest, in this process, and prints one line for each check."""

import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from reference.files.writing import write_atomically

from .. import pytest_plugin
from ..conformance.check_runner import Bench

PACKAGE = Path(pytest_plugin.__file__).parent
PLAIN = (
    f"{PACKAGE / 'test_conformance.py'}",
    *("-c", os.devnull, "--noconftest", "--capture=no", "--assert=plain", "--import-mode=importlib"),
    f"--rootdir={PACKAGE.parent}",
    *("-pno:cacheprovider", "-pno:faulthandler", "-pno:logging", "-pno:warnings"),
    *("-pno:threadexception", "-pno:unraisableexception"),
)
"""The tests, and options without which pytest would read settings of the user's tests, write files, or print."""
ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}


def run_tests(name: str, arguments: list[str], junit: Path | None) -> Bench | None:
    """Run tests on a class; settings and plugins of the user's own tests have no effect.

    Args:
        name: The class.
        arguments: Options, as for the command `pytest`.
        junit: Where to write the outcomes as JUnit XML. None: nowhere.

    Returns:
        The bench, which has the results. None: no test began.

    Raises:
        ValueError: An option makes no sense, or the class does not wrap a module.
    """
    output = _ResultPrinter()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, ENVIRONMENT):
        report = Path(folder) / "junit.xml"
        written = (f"--junitxml={report}", f"--junitprefix={name}", "-o", f"junit_suite_name=conformance of {name}")
        pytest.main([*PLAIN, *written, *arguments], plugins=[pytest_plugin, output])
        if output.error is not None:
            raise output.error
        if junit is not None:
            write_atomically(junit, report.read_bytes())
    return output.bench


class _ResultPrinter:
    """pytest plugin that prints results in place of pytest's own output.

    Attributes:
        bench: The class under test and the results.
        error: What ended the tests, other than a failed check.
    """

    def __init__(self) -> None:
        self.bench: Bench | None = None
        self.error: BaseException | None = None
        self._shown = 0

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Silence pytest."""
        config.pluginmanager.unregister(name="terminalreporter")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Function) -> None:
        """Print the result of a test, if it has one: the test of the baseline has none."""
        bench = item.funcargs.get("bench")
        if isinstance(bench, Bench):
            self.bench = bench
            for result in bench.results[self._shown :]:
                print(f"{result.outcome:13}  {result.check}{': ' if result.message else ''}{result.message}")
            self._shown = len(bench.results)

    def pytest_exception_interact(self, node: pytest.Item, call: pytest.CallInfo[object]) -> None:
        """Stop after an error that is no result of a check: a bad option, a class that cannot be constructed."""
        assert call.excinfo is not None
        error = call.excinfo.value
        if not isinstance(error, pytest.fail.Exception) or error.__cause__ is not None:
            self.error = error.__cause__ or error
            node.session.shouldstop = "it is no result of a check"

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Keep Ctrl-C; pytest calls this after `shouldstop` too."""
        self.error = self.error or excinfo.value

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> bool:
        """Keep an error of pytest or of a plugin, and don't print it here."""
        self.error = self.error or excinfo.value
        return True
