"""What a choice costs: seconds, bytes, the bill of a step and its timeline."""
