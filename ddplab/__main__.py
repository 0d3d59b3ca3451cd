"""`python -m ddplab`: the command `ddplab`."""

import os
import sys
from pathlib import Path

from .command import main

if __name__ == "__main__":
    if sys.path[0] == os.getcwd() != str(Path(__file__).parents[1]):
        del sys.path[0]  # where Python has put it, although no module of the user's was named
    main()
