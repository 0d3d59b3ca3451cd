"""An iteration as a script that all ranks perform: from what the reducer was told to plain numbers."""
