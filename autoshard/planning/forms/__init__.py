"""What an export can say of a plan, and the best plan within that."""
