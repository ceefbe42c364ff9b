"""The search over meshes: candidates, their order, and the choice of the best one."""
