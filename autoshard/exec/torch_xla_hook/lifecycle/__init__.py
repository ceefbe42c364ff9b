"""The states between which the hook moves a script, and the doors through which it is turned on."""
