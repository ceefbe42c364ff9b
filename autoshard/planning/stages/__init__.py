"""Plans in pipeline stages: cuts, prices of segments, and a program for each stage."""
