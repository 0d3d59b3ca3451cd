"""Follow every link of the site, as who builds it: LinkChecker as root becomes nobody, who may not read the tree."""

from unittest import mock

from linkcheck.command import linkchecker


def main() -> None:
    """Check what the command line names; exits with 1 if a link leads nowhere."""
    with mock.patch.object(linkchecker, "drop_privileges"):
        linkchecker.linkchecker()


if __name__ == "__main__":
    main()
