"""What goes into a step as one packed array, and what comes out of it."""
