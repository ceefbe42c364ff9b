"""The states between which the hook moves a script, and the functions that turn the hook on."""
