"""Specs on values of later steps, and inputs placed as planned."""
