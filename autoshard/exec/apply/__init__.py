"""Application of a plan to a program: JAX functions, opaque calls, torch modules, `jax.export` artifacts."""
