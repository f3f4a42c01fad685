"""The commands: one thin file each, found by name in `main.COMMANDS`."""
