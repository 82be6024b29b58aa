"""The command line: one thin file a verb. Waits for: the user. Everything it shows comes from the packages below it."""
