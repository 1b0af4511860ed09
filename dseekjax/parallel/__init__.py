"""Where arrays live: the device mesh, sharding rules, and what moves along its axes."""
