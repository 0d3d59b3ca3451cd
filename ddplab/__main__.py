"""`python -m ddplab`: the command `ddplab`."""

from .command import main

if __name__ == "__main__":
    main()
