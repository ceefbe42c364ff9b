"""Pipeline stages that are separate programs: cuts, prices of segments, and a program for each stage."""
