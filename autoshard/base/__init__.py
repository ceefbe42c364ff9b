"""What every room stands on and that knows nothing of sharding: processes, helpers, files, what is kept on disk."""
