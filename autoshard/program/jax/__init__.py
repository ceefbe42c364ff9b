"""Programs from JAX functions, Equinox, Flax and Keras models, and decoders made from their dims."""
