"""Groups of commands: what can be typed. The work of each command is done in a module of its own, imported late."""
