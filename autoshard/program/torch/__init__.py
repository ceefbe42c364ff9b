"""Programs from torch modules: layers scanned, state named, remat marked."""
