"""JAX lowerings of torch operations, and torch's semantics of views and writes."""
