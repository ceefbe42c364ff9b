"""Plans for captured steps, on the topology that the runtime reports, cached on disk."""
