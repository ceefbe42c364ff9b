"""Reading a module into an `OpGraph`: ops, loops, constraints and sharding rules."""
