"""The commands of `ddplab`: each reads its arguments, calls one function, and shows what that returned."""
