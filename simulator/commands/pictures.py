"""Pictures that commands draw: their endings are checked before any work, and they are written whole."""

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure

from reference.files import write_whole

ENDINGS = (".png", ".svg", ".pdf")


def check_picture(option: str, path: Path | None) -> None:
    """Raise ValueError unless the path, if there is one, ends as a picture."""
    if path is not None and path.suffix not in ENDINGS:
        raise ValueError(f"{option}: expected a name that ends in {', '.join(ENDINGS)}; got {path}")


def save_picture(figure: Figure, path: Path) -> None:
    """Write it, and say so."""
    data = BytesIO()
    figure.savefig(data, format=path.suffix.lstrip("."), dpi=120)
    write_whole(path, data.getvalue())
    print(f"drawn in {path}")
