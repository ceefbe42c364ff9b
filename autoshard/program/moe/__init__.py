"""Mixtures of experts: routing, dispatch and experts as ops that can be sharded."""
