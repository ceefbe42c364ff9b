"""A plan put on a program: JAX functions, opaque calls, torch modules, `jax.export` artifacts."""
