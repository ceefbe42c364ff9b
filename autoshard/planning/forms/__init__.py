"""Forms of an export: the parts of a plan that each form can express, and the best plan within them."""
