"""One program on several topologies, with several batches and remat variants."""
