"""Model files, read with limits; nothing in them is ever executed."""
