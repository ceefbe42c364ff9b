"""Published runs, rebuilt and priced."""
