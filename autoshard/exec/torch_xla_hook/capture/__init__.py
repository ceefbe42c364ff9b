"""The first step of a script: its lazy graph, its tensors, and the modules that ran."""
