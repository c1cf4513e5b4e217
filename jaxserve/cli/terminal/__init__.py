"""What people see in a terminal: the progress of a start, the ready card, and the shell of `jaxserve chat`."""
