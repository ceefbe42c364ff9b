"""What if: one model on many topologies, with many batches; guessed, planned, and served."""
