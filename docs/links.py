"""Run LinkChecker as the current user: as root it would switch to `nobody`, which may lack read permission."""

from unittest import mock

from linkcheck.command import linkchecker


def main() -> None:
    """Check the pages named on the command line; exit with status 1 if a link is broken."""
    with mock.patch.object(linkchecker, "drop_privileges"):
        linkchecker.linkchecker()


if __name__ == "__main__":
    main()
