"""Values that compilers store: fusion, lifetimes, dtypes and layouts of buffers."""
