"""The file of a cluster."""

from pathlib import Path

LAB = Path(__file__).with_name("example-lab.yaml")
